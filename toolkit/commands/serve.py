"""`python -m toolkit serve`: OpenAI's interface to a model that need not fit into memory."""

import argparse
import ipaddress
import socket
import sys
from pathlib import Path

from toolkit.commands.opening import add_model_options, opened_to_answer
from toolkit.errors import UserError, disk_trouble, whole
from toolkit.extras import extra

PORT, WAITING = 8080, 64
ENDING_S = 3  # for answers that are under way


def add_parser(commands, **style) -> None:
    """Add the command and its options to the commands of a parser; `style` goes to `add_parser` there."""
    parser = commands.add_parser("serve", help="serve a model as OpenAI does", description=serve.__doc__, **style)
    parser.set_defaults(command=serve)
    add_model_options(parser)
    parser.add_argument("--host", default="127.0.0.1", help="the address to listen at (default: 127.0.0.1)")
    parser.add_argument("--port", type=whole, default=PORT, help=f"default: {PORT}")
    parser.add_argument("--token", help="clients send it as their API key; needed for another --host than this machine")
    waiting = f"requests that may wait for the one that runs; others get status 429 (default: {WAITING})"
    parser.add_argument("--queue", type=whole, default=WAITING, help=waiting)
    again = "compute the earlier turns of a conversation again, so that a text depends on its own request alone"
    parser.add_argument("--exact", action="store_true", help=again)


def serve(options: argparse.Namespace) -> None:
    """Answer requests as OpenAI's servers do, at /v1/models, /v1/completions and /v1/chat/completions.

    One request runs at a time, and others wait. A conversation that goes on has its key-value cache still, if no other
    request came between. The last digits then differ from those of a conversation that is computed again.
    """
    with extra("serve"):
        import uvicorn
    if not _is_local(options.host) and not options.token:
        raise UserError(f"--host {options.host}: others can reach it; add --token, which clients have to send")
    name = _name_of(options.folder)
    with _listening(options.host, options.port) as listening:
        print(f"opening {options.folder}", file=sys.stderr, flush=True)  # what is imported now takes seconds
        from toolkit.offload.generation import Reuse

        reuse = Reuse.ALONE if options.exact else Reuse.PASSES
        with opened_to_answer(options, scored=True, reuse=reuse) as (opened, writer):
            from toolkit.serving.app import make_app
            from toolkit.serving.server import StoppingServer

            app = make_app(writer, name, options.token, options.queue)
            where = f"http://{options.host}:{options.port}/v1"
            print(f"{name} is at {where} ({writer.context} tokens of context); Ctrl-C ends", file=sys.stderr)
            settings = {"log_level": "warning", "timeout_graceful_shutdown": ENDING_S}
            try:
                StoppingServer(uvicorn.Config(app, **settings)).run(sockets=[listening])
            finally:  # Ctrl-C is raised once more when the server has ended
                print(opened.memory(), file=sys.stderr)


def _name_of(place: Path) -> str:
    """The name that clients send: of a folder or file its own without the ending, of a known model as it was given."""
    return place.stem if place.is_file() else place.resolve().name


def _is_local(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _listening(host: str, port: int) -> socket.socket:
    """A socket that listens. Raises `UserError` for an address that cannot be had."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family)
    except (OSError, OverflowError) as error:
        if trouble := disk_trouble(error):
            raise trouble from error
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"--host {host} --port {port}: cannot be listened at ({reason}); take another port") from error

"""The command line: `sparse-offload plan` and others; `python -m toolkit` is the same command."""

import argparse
import atexit
import gc
import sys
from contextlib import suppress
from pathlib import Path

from toolkit import interrupts
from toolkit.errors import Parser, run_command

SCRIPT = "sparse-offload"  # by pyproject.toml


def main(arguments: list[str] | None = None) -> int:
    """Parse and run; 0 if all is well, 2 for bad input, 130 or 143 when interrupted, 141 if nobody reads the text."""
    atexit.unregister(gc.freeze)
    atexit.register(gc.freeze)  # Python's last collections look at all objects of the libraries: more than a second
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError):  # a stream of somebody else's
            stream.reconfigure(errors="backslashreplace")  # paths and texts may hold what the terminal cannot show
    with interrupts.raised():
        return run_command(lambda: _main(arguments))


def _main(arguments: list[str] | None) -> int:
    from toolkit.commands.packers import PACKERS  # not above: Ctrl-C while modules load is one line, too

    given = sys.argv[1:] if arguments is None else arguments
    options = _parser().parse_args(given or ["--help"])
    packer = PACKERS.get(getattr(options, "method", ""))
    left = "the same command goes on where it was" if packer and packer.resumable else "nothing was left behind"
    return run_command(lambda: options.command(options), stopped=f"stopped; {left}")


def _parser() -> Parser:
    from toolkit.commands import bench, chat, notebooks, pack, plan, run, serve

    called = Path(sys.argv[0]).name
    parser = Parser(prog=called if called == SCRIPT else "python -m toolkit", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="plan | pack | run | chat | serve | bench | notebooks")
    for command in (plan, pack, run, chat, serve, bench, notebooks):
        command.add_parser(commands, formatter_class=argparse.RawDescriptionHelpFormatter)
    return parser


if __name__ == "__main__":
    sys.exit(main())

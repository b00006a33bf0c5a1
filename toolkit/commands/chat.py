"""`python -m toolkit chat`: a conversation with a model that need not fit into memory."""

import argparse
import contextlib
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from toolkit.commands.opening import Opened, add_model_options, opened_to_answer
from toolkit.commands.sampling import add_sampling_options, sampling_of
from toolkit.commands.texts import check_standard_input
from toolkit.errors import UserError, unknown
from toolkit.files import write_json

if TYPE_CHECKING:
    from toolkit.offload.conversation import Conversation
    from toolkit.offload.generation import Request, Writer

COMMANDS = {
    "/reset": "forget the conversation and begin anew",
    "/save FILE": "write the conversation as JSON: a list of messages, each with role and content",
    "/quit": "end (so do /exit, /bye and the end of the input)",
    "/help": "this list",
}
ALIASES = {"/exit": "/quit", "/bye": "/quit"}  # as other programs have it
HINT = "Ctrl-C stops an answer; /help lists the commands, /quit ends"
ENDS = {
    "context": "the context of {} tokens is full and the answer ends here: /reset begins anew, --context gives more",
    "cancelled": "stopped; the answer stays as far as it came",
}


def add_parser(commands, **style) -> None:
    """Add the command and its options to the commands of a parser; `style` goes to `add_parser` there."""
    parser = commands.add_parser("chat", help="talk with a model", description=chat.__doc__, **style)
    parser.set_defaults(command=chat)
    add_model_options(parser)
    parser.add_argument("--system", metavar="TEXT", help="instructions that the conversation begins with")
    add_sampling_options(parser)


def chat(options: argparse.Namespace) -> None:
    """Talk with a model: each line of the input is a message, and its answer is printed as it comes.

    The model's own chat template says how a conversation is written. The key-value cache is kept, so that only new
    tokens are computed. A line after each answer has its speed, the bytes read from disk for a token, and memory.
    """
    sampling = sampling_of(options)
    check_standard_input()
    print(f"opening {options.folder}", file=sys.stderr, flush=True)  # what is imported now takes seconds
    with opened_to_answer(options) as (opened, writer):
        from toolkit.offload.conversation import Conversation
        from toolkit.offload.generation import Request

        conversation = Conversation(writer, options.system)
        if not conversation.templated:
            _say("this model has no chat template: it continues your lines as plain text")
        _say(f"{writer.context} tokens of context. {HINT}")
        _Talk(opened, writer, conversation, Request(sampling, stops=tuple(options.stop))).run()


class _Talk:
    """The lines of a user, and what comes of them."""

    def __init__(self, opened: Opened, writer: "Writer", conversation: "Conversation", request: "Request"):
        self._opened, self._writer, self._conversation, self._request = opened, writer, conversation, request
        self._asking = self._stopped = False

    def run(self) -> None:
        """Until the user ends it."""
        with _interrupts(self._interrupted):
            for line in self._lines():
                try:
                    if line.startswith("/"):
                        if self._command(*line.split(maxsplit=1)):
                            return
                    elif line:
                        self._answer(line)
                except UserError as error:  # the conversation goes on
                    _say(f"error: {error}")

    def _interrupted(self) -> None:
        """Ctrl-C stops an answer, or drops the line that is being written."""
        if self._asking:
            raise _Dropped
        self._stopped = True

    def _lines(self) -> Iterator[str]:
        """The lines of the input, without spaces around them."""
        prompt = "> " if sys.stdin.isatty() and sys.stdout.isatty() else ""
        if prompt:
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401 (input() has its keys then)
        while True:
            try:
                self._asking = True
                line = input(prompt)
                self._asking = False
            except EOFError:
                return
            except _Dropped:
                _say("")
                _say(HINT)
                continue
            yield line.encode("utf-8", "surrogateescape").decode("utf-8", "replace").strip()

    def _command(self, name: str, place: str = "") -> bool:
        """Do what a command asks for; whether it ends the conversation."""
        name = ALIASES.get(name, name)
        known = [command.split()[0] for command in COMMANDS]
        if name not in known:
            raise unknown("command", name, known)
        if name == "/help":
            for command, words in COMMANDS.items():
                _say(f"{command:<12}{words}")
        elif name == "/save":
            if not place:
                raise UserError("/save: name the file, as in /save talk.json")
            write_json(Path(place), self._conversation.messages)
            _say(f"{len(self._conversation.messages)} messages are in {place}")
        elif name == "/reset":
            self._conversation.reset()
            _say("the conversation is empty")
        return name == "/quit"

    def _answer(self, question: str) -> None:
        model, begun_s, read = self._writer.model, time.perf_counter(), []
        came_s, end = [], ""
        self._stopped = False
        try:
            for piece in self._conversation.ask(question, self._request, lambda: self._stopped):
                if piece.token is not None:
                    came_s.append(time.perf_counter())
                    read.append(model.read_bytes)
                print(piece.text, end="", flush=True)
                end = piece.end
        finally:
            print(flush=True)
        if end in ENDS:
            _say(ENDS[end].format(self._writer.context))
        self._say_speed([at - begun_s for at in came_s], read)

    def _say_speed(self, came_s: list[float], read: list[int]) -> None:
        """The line after an answer."""
        parts = [f"{len(came_s)} tokens"]
        if came_s:
            parts[0] += f", the first after {came_s[0]:.1f} s"
        if len(came_s) > 1:
            a_token = (read[-1] - read[0]) / (len(read) - 1) / 1e6
            parts[0] += f", then {(len(came_s) - 1) / (came_s[-1] - came_s[0]):.1f} a second"
            parts.append(f"{a_token:.0f} MB read a token")
        parts.append(self._opened.memory())
        parts.append(f"{self._conversation.tokens} of {self._writer.context} tokens of context")
        _say(f"[{'; '.join(parts)}]")


def _say(words: str) -> None:
    print("".join(it if it.isprintable() else repr(it)[1:-1] for it in words), file=sys.stderr, flush=True)


class _Dropped(KeyboardInterrupt):
    """Ctrl-C while no answer is written."""


@contextmanager
def _interrupts(handle: Callable[[], None]) -> Iterator[None]:
    """Inside the block Ctrl-C calls `handle`."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, lambda *_: handle())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)

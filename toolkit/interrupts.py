"""Ctrl-C, SIGTERM and SIGHUP end a command at once, also where a library swallows the exception.

    with interrupts.raised():
        ...                       # raises `Interrupted`

Python drops an exception that a signal raises inside a destructor or a callback, and importing runs many of those.
Some libraries turn any exception into one of their own. So the exception comes again until somebody handles it.
"""

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType

AGAIN_S = 0.1
DEFAULTS = {
    signal.SIGINT: signal.default_int_handler,
    signal.SIGTERM: signal.SIG_DFL,
    signal.SIGHUP: signal.SIG_DFL,
    signal.SIGALRM: signal.SIG_DFL,
}
_received: list[int] = []
_again = False  # whether the exception comes again: a stroke of the clock may reach Python after the clock stops


class Interrupted(KeyboardInterrupt):
    """A signal asks the command to end.

    A class of its own: once a plain `KeyboardInterrupt` has gone through `exec`, Python ends the process by SIGINT,
    whatever its exit status is.
    """


def received() -> bool:
    """Whether a signal asked this command to end."""
    return bool(_received)


def settle() -> int:
    """The first signal that asked this command to end, SIGINT if it was not noted; the exception comes no more."""
    global _again
    _again = False
    signal.setitimer(signal.ITIMER_REAL, 0)
    return _received[0] if _received else signal.SIGINT


@contextlib.contextmanager
def raised() -> Iterator[None]:
    """Inside the block the three signals raise `Interrupted`, again and again while nobody handles it.

    A signal that the process ignores or handles already stays so. Only the main thread gets signals; in any other one
    this does nothing.
    """
    main = threading.current_thread() is threading.main_thread()
    before = {number: signal.getsignal(number) for number in DEFAULTS if main}
    ours = [number for number, handler in before.items() if handler == DEFAULTS[number]]
    _received.clear()
    try:
        for number in ours:
            signal.signal(number, _raise)
        yield
    finally:
        if _received:
            settle()
        for number in ours:
            signal.signal(number, before[number])


def _raise(number: int, frame: FrameType | None) -> None:
    """Raise `Interrupted`; for the clock's signal, only while nobody handles an earlier one."""
    global _again
    if number != signal.SIGALRM:
        _received.append(number)
        _again = True
    elif not _again:
        return
    signal.setitimer(signal.ITIMER_REAL, AGAIN_S)
    if number == signal.SIGALRM and _handled(sys.exc_info()[1]):
        return
    raise Interrupted


def _handled(error: BaseException | None) -> bool:
    """Whether this error, or one before it, is an interrupt: clean-up is under way."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__context__
    return error is not None

"""Errors for the user, and the one place where a command line prints them."""

import argparse
import contextlib
import difflib
import errno
import os
import re
import select
import sys
from collections.abc import Callable, Iterable

from toolkit import interrupts

DISK_TROUBLE = {  # what the system's error means for a path, and what helps
    errno.EACCES: ("no permission", "change its mode or owner"),
    errno.EPERM: ("no permission", "change its mode or owner"),
    errno.EROFS: ("its file system is read-only", "mount it writable"),
    errno.ENOSPC: ("no space left", "free some"),
    errno.EDQUOT: ("no space left within your quota", "free some"),
    errno.EFBIG: ("too large a file for its file system", "make it smaller"),
    errno.ENOTDIR: ("a part of this path is no folder", "move that part away"),
    errno.EISDIR: ("a folder is where a file is expected", "move it away"),
    errno.EEXIST: ("something that is there already is in the way", "move it away"),
    errno.ENOTEMPTY: ("something that is there already is in the way", "move it away"),
    errno.ENOENT: ("there is no such file or folder", "look for a wrong name or a link that leads nowhere"),
    errno.ENAMETOOLONG: ("a name in this path is too long", "choose a shorter one"),
    errno.ELOOP: ("a link is where a file or folder is expected", "remove the link"),
    errno.EIO: ("the disk cannot read or write it", "look for disk errors with dmesg"),
    errno.ESTALE: ("the network file system lost it", "mount it anew"),
    errno.ENOLCK: ("its file system cannot lock files", "mount it with locks"),
    errno.EMFILE: ("too many files are open", "raise the limit with ulimit -n"),
    errno.ENFILE: ("too many files are open on this machine", "close other programs"),
    errno.EBUSY: ("it is in use", "wait for whoever uses it"),
}
FULL = {errno.ENOSPC, errno.EDQUOT}
NAMELESS = FULL | {errno.EMFILE, errno.ENFILE}  # trouble of the whole process or disk, whatever path it is about
STOPPED = 128  # exit statuses of shells: this, and the number of the signal
READER_GONE = STOPPED + 13  # of SIGPIPE


class UserError(ValueError):
    """Bad input: the message is one line that names the value, what was expected and what to do.

    The command line prints it without a traceback and exits with status 2.
    """


def unknown(kind: str, name: object, choices: Iterable[object]) -> UserError:
    """The error for a name that a registry does not hold. It lists the names there are, and the one that was meant."""
    known = sorted(map(str, choices))
    return UserError(f"unknown {kind} {name!r:.99}; choose from: {', '.join(known)}{did_you_mean(name, known)}")


def did_you_mean(name: object, choices: Iterable[str]) -> str:
    """`; did you mean 'wanda'?` for a name that is like one of the choices, else nothing."""
    close = difflib.get_close_matches(str(name), choices, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def disk_trouble(
    error: BaseException, path: str | os.PathLike | None = None, elsewhere: str = "name another place"
) -> UserError | None:
    """The one-line error for trouble with a disk: it names the path, what is wrong and what helps.

    `path` is what the error is about; without it, it is the file that the error names. `elsewhere` says how to use
    another place. None for an error of another kind, or without a path: such errors are faults of the program.
    """
    found = _errno(error)
    path = path if path is not None else getattr(error, "filename", None)
    if isinstance(error, UserError) or found not in DISK_TROUBLE or not isinstance(path, str | bytes | os.PathLike):
        return None
    what, aid = DISK_TROUBLE[found]
    name = os.fsdecode(path)
    return UserError(f"{name if name.isprintable() else repr(name)}: {what}; {aid}, or {elsewhere}")


class Parser(argparse.ArgumentParser):
    """A parser whose complaints are a `UserError`, which `run_command` tells in one line."""

    def error(self, message: str):
        """Raise the complaint."""
        raise UserError(f"{message} (--help lists the options)")

    def _check_value(self, action: argparse.Action, value: object) -> None:
        """Raise the complaint about a value that is none of the choices, with the one that was meant."""
        if action.choices is not None and value not in action.choices:
            raise unknown("/".join(action.option_strings) or "command", value, action.choices)

    def _print_message(self, message: str, file=None) -> None:
        """Print it. argparse's own hides an error of the output."""
        (file or sys.stderr).write(message)


def check_whole(name: str, value: object) -> None:
    """Raise `UserError` for an argument that is no whole number from 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UserError(f"{name}={value!r}: expected a whole number from 1")


def whole(text: str) -> int:
    """A whole number from 1, as the type of an option."""
    if not re.fullmatch("0*[1-9][0-9]{0,17}", text):
        raise argparse.ArgumentTypeError(f"{text}: expected a whole number from 1")
    return int(text)


def share(text: str) -> float:
    """A number from 0 to 1, as the type of an option."""
    try:
        if 0 <= (number := float(text)) <= 1:
            return number
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"{text}: expected a share from 0 to 1")


def run_command(command: Callable[[], int | None], stopped: str = "stopped") -> int:
    """Run what a command line asks for, and return the exit status: the command's own, or 0 if it gives None.

    Bad input and trouble with a disk are one line of printable letters and status 2. Ctrl-C is the line `stopped`, or
    the words of the exception, and status 130; any other signal of `toolkit.interrupts` is that line and 128 with the
    signal's number. If whoever reads the output is gone, as in `run ... | head`, the command ends with a line and
    status 141. Any other error is a fault of the program and passes with its traceback.
    """
    try:
        return _flushed(command)
    except KeyboardInterrupt as error:
        return _stopped(str(error) or stopped)
    except Exception as error:
        if interrupts.received():  # a library made another error of it
            return _stopped(stopped)
        message = error if isinstance(error, UserError) else _output_trouble(error) or disk_trouble(error)
        message = message or _nameless_trouble(error) or _memory_trouble(error)
        if message is None:
            raise
        if isinstance(message, BrokenPipeError):
            return _tell("stopped: nobody reads the output", READER_GONE)
        return _tell(f"error: {message}", 2)


def _flushed(command: Callable[[], int | None]) -> int:
    """Run it, and write out all that it printed: an error of that is an error of the command."""
    try:
        return command() or 0
    finally:  # also after --help, which ends by SystemExit
        if sys.stdout is not None and not isinstance(sys.exc_info()[1], Exception):
            sys.stdout.flush()


def _stopped(words: str) -> int:
    return _tell(words, STOPPED + interrupts.settle())


def _tell(words: str, status: int) -> int:
    """Print one line of printable letters to standard error, if somebody reads that; return the status."""
    with contextlib.suppress(OSError):
        print("".join(it if it.isprintable() else repr(it)[1:-1] for it in words), file=sys.stderr)
    return status


def _output_trouble(error: Exception) -> UserError | BrokenPipeError | None:
    """The error of writing to standard output or standard error, if this is one. Nothing is written there any more.

    The text that could not be written fails again. A pipe without a reader says so itself.
    """
    if not isinstance(error, OSError) or error.filename is not None:
        return None
    broken = []
    for name, stream in {"standard error": sys.stderr, "standard output": sys.stdout}.items():
        with contextlib.suppress(AttributeError, ValueError):  # it is closed, or no file
            if not _writable(stream, error):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
                broken.append(name)
    if not broken:
        return None
    return error if isinstance(error, BrokenPipeError) else disk_trouble(error, broken[-1], "write elsewhere")


def _writable(stream, error: OSError) -> bool:
    try:
        stream.flush()
    except OSError as again:
        return again.errno != error.errno
    poll = select.poll()
    poll.register(stream.fileno(), 0)
    return not (isinstance(error, BrokenPipeError) and poll.poll(0))


def _nameless_trouble(error: Exception) -> UserError | None:
    """The line for trouble that needs no path to be understood."""
    if not isinstance(error, OSError) or (found := _errno(error)) not in NAMELESS:
        return None
    return UserError("{}; {}".format(*DISK_TROUBLE[found]))


def _memory_trouble(error: Exception) -> UserError | None:
    """The line for memory that the system refused: Python has an error of its own for it, torch has words."""
    refused = isinstance(error, MemoryError) or "can't allocate memory" in str(error)
    return UserError("memory is short: the system refused to give more; close other programs") if refused else None


def _errno(error: BaseException) -> int | None:
    """The system's error number. Libraries in Rust give it in words, and some hide a full disk behind another error."""
    words = re.search(r"\(os error (\d+)\)", str(error))
    own = error.errno if isinstance(error, OSError) else int(words[1]) if words else None
    return own if own in DISK_TROUBLE else errno.ENOSPC if _full(error) else None


def _full(error: BaseException | None) -> bool:
    while error is not None:
        if getattr(error, "errno", None) in FULL or "No space left on device" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False

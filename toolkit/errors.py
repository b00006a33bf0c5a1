"""Errors for the user, and the one place where a command line prints them."""

import argparse
import difflib
import errno
import os
import re
import sys
from collections.abc import Callable, Iterable

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

    Bad input and trouble with a disk are one line of printable letters and status 2. Ctrl-C is the line `stopped` and
    status 130. Any other error is a fault of the program and passes with its traceback.
    """
    try:
        return command() or 0
    except KeyboardInterrupt:
        print(stopped, file=sys.stderr)
        return 130
    except Exception as error:
        message = error if isinstance(error, UserError) else disk_trouble(error)
        if message is None:
            raise
        shown = "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in str(message))
        print(f"error: {shown}", file=sys.stderr)
        return 2


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

"""Errors that are written for the user."""

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """Bad input: the message is one line that names the value, what was expected and what to do.

    The command line prints it without a traceback and exits with status 2.
    """


def unknown(kind: str, name: object, choices: Iterable[object]) -> UserError:
    """The error for a name that a registry does not hold. It lists the names there are, and the one that was meant."""
    known = sorted(map(str, choices))
    return UserError(f"unknown {kind} {name!r}; choose from: {', '.join(known)}{did_you_mean(name, known)}")


def did_you_mean(name: object, choices: Iterable[str]) -> str:
    """`; did you mean 'wanda'?` for a name that is like one of the choices, else nothing."""
    close = difflib.get_close_matches(str(name), choices, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""

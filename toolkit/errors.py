"""Errors meant for the person at the keyboard."""

from collections.abc import Iterable


class UserError(ValueError):
    """Bad input: the message is one line that names the value, what was expected and what to do.

    The command line prints it without a traceback and exits with status 2.
    """


def unknown(kind: str, name: object, choices: Iterable[str]) -> UserError:
    """The error for a name that a registry does not hold: it lists the names that it does."""
    return UserError(f"unknown {kind} {name!r}; choose from: {', '.join(sorted(choices))}")

"""Errors that are written for the user."""

from collections.abc import Iterable


class UserError(ValueError):
    """Bad input: the message is one line that names the value, what was expected and what to do.

    The command line prints it without a traceback and exits with status 2.
    """


def unknown(kind: str, name: object, choices: Iterable[object]) -> UserError:
    """The error for a name that a registry does not hold. It lists the names that the registry holds."""
    return UserError(f"unknown {kind} {name!r}; choose from: {', '.join(sorted(map(str, choices)))}")

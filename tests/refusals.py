"""Refusals as a user meets them: one line that says what is wrong, in Python and on the command line."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from toolkit.__main__ import main
from toolkit.errors import UserError


@contextmanager
def refused(*words: str, kind: type[Exception] = UserError) -> Iterator[pytest.ExceptionInfo]:
    """The block is refused in one line, in which each of these texts or regular expressions is found."""
    with pytest.raises(kind) as caught:
        yield caught
    told = str(caught.value)
    assert "\n" not in told
    for word in map(str, words):
        assert word in told or re.search(word, told), told


def refused_command(arguments: list[str], words: str, capfd: pytest.CaptureFixture) -> None:
    """The command ends with status 2, and its last line is an error with these words."""
    capfd.readouterr()
    assert main(arguments) == 2, arguments
    error = capfd.readouterr().err.splitlines()[-1]
    assert error.startswith("error: ")
    assert words in error

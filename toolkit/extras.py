"""Packages that only some parts of the toolkit need: the extras of `pyproject.toml`.

with extra("lab"):
    import seaborn as sns
"""

import importlib.metadata
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress

from toolkit.errors import UserError

NAME = "sparse-offload-toolkit"  # by pyproject.toml


@contextmanager
def extra(name: str) -> Iterator[None]:
    """Import packages of an extra in the block. Raises `UserError` with the command that installs a missing one."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "toolkit").startswith("toolkit"):
            raise
        command = f"pip install '{NAME}[{name}]'"
        raise UserError(f"the package {error.name} is not installed; {command} installs it") from error


def installed_versions(names: Iterable[str]) -> dict[str, str]:
    """The version of each of these packages that is installed; those of an extra may be missing."""
    versions = {}
    for name in names:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions

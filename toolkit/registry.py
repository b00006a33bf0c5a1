"""The names of a registry as choices of an option or a parameter: its module is imported when they are looked up.

parser.add_argument("--policy", choices=Registry("toolkit.offload.ways:POLICIES"), metavar="NAME")

Without a `metavar`, argparse lists the choices, and so imports the module, when the option is added.
"""

import importlib
from collections.abc import Collection, Iterator


class Registry(Collection[str]):
    """The names at `place`, "module:attribute": those that a table or a tuple holds, or that a function returns."""

    def __init__(self, place: str):
        self._module, _, self._attribute = place.partition(":")

    def __contains__(self, name: object) -> bool:
        """Whether it is one of the names."""
        return name in self._names()

    def __iter__(self) -> Iterator[str]:
        """Each name."""
        return iter(self._names())

    def __len__(self) -> int:
        """The number of names."""
        return len(self._names())

    def _names(self) -> Collection[str]:
        names = getattr(importlib.import_module(self._module), self._attribute)
        return names() if callable(names) else names

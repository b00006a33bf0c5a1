"""Namespaces: packages that list names, each of which is imported when it is first used (PEP 562).

    from typing import TYPE_CHECKING

    if TYPE_CHECKING:
        from toolkit.residency.policies import Lru, SlidingWindow
    else:
        __getattr__, __dir__ = lazy(__name__)

    __all__ = ["Lru", "SlidingWindow"]

So the imports are written once, as editors and type checkers read them. `lazy` reads the same lines, and so does
`toolkit.sources`, for which `residency.Lru` leads to the module that defines it and not to the whole package.
"""

import ast
import sys
from collections.abc import Callable
from functools import cache
from importlib import import_module
from pathlib import Path


def lazy(package: str) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` of a package, by its `__all__` and its imports beneath `if TYPE_CHECKING:`.

    An unknown name raises `AttributeError`. A listed name must not be that of a module of the package, unless it means
    this module: Python binds that one itself, as soon as the module is imported.
    """

    module = sys.modules[package]

    @cache
    def origins() -> dict[str, tuple[str, str]]:
        from toolkit.source_facts import passed_on

        return passed_on(ast.parse(Path(str(module.__file__)).read_text(encoding="utf-8")))

    def attribute(name: str) -> object:
        if name not in names():
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        origin, original = origins()[name]
        return import_module(f"{package}.{name}") if origin == package else getattr(import_module(origin), original)

    def names() -> list[str]:
        return vars(module).get("__all__", [])  # it comes last, after imports that may lead back here

    return attribute, names

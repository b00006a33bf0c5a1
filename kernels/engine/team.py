"""The OpenMP threads of the process: those of torch, or those that it would have.

A process without torch loads the OpenMP library that torch brings, or the system's. Where there is none, and in a
forked child, there are no threads.
"""

import contextlib
import ctypes
import os
import sys
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path

PROCESS = os.getpid()


def num_threads() -> int:
    """How many threads torch works with, or would: the OpenMP library's number if torch is not imported."""
    torch, team = sys.modules.get("torch"), _team()
    if torch is not None:
        return torch.get_num_threads()
    return team.omp_get_max_threads() if team else 1


@cache
def fork() -> Callable | None:
    """`GOMP_parallel` of the OpenMP library that torch itself is linked with; None if there is none to use."""
    found = getattr(_team(), "GOMP_parallel", None)
    if found:
        found.argtypes, found.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint], None
    return found


@cache
def _team() -> ctypes.CDLL | None:
    """The OpenMP library of the process: the one that torch is linked with, or would be."""
    if os.getpid() != PROCESS:  # a forked child: the library would wait for threads of the parent for ever
        return None
    torch = sys.modules.get("torch")
    for file in [torch._C.__file__] if torch else [*_of_torch(), "libgomp.so.1"]:
        with contextlib.suppress(OSError, AttributeError):
            library = ctypes.CDLL(file)
            library.GOMP_parallel, library.omp_get_max_threads  # noqa: B018 - both are there
            return library
    return None


def _of_torch() -> list[str]:
    """The OpenMP libraries in torch's package, which is not imported for that."""
    package = find_spec("torch")
    places = (Path(place) / "lib" for place in (package and package.submodule_search_locations) or ())
    return [str(file) for place in places for file in place.glob("libgomp*.so*")]


def _after_fork() -> None:
    """A forked child has none of its parent's threads, which torch's own products would wait for, too."""
    fork.cache_clear()
    _team.cache_clear()
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)


os.register_at_fork(after_in_child=_after_fork)

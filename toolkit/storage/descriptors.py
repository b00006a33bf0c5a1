"""The descriptors that readers read through: one for each file, however many readers it has, and not too many at once.

    held = opened(file)
    os.preadv(held.number, ...)

A process may have some thousand descriptors, often fewer, and a model has a file for each layer. So those that were
opened first are closed when there are too many, and opened again when they are needed. That takes some 20 microseconds.
"""

import os
import resource
import threading
import weakref
from collections.abc import Iterable

from toolkit.storage.direct import StoredFile, open_direct

MOST = 256  # open at once
SHARE = 4  # of the process's limit, at most a part of so many


class Descriptor:
    """An open file, closed when nobody refers to it any longer.

    Raises `ChangedError` for a file that has changed, and `OSError`.
    """

    def __init__(self, file: StoredFile):
        file.check()
        self.number, _ = open_direct(str(file.path))
        weakref.finalize(self, os.close, self.number)
        file.check(self.number)


_OPEN: dict[StoredFile, Descriptor] = {}  # those that were opened first come first
_LOCK = threading.Lock()


def opened(file: StoredFile) -> Descriptor:
    """A descriptor of a file, which stays open at least as long as the caller refers to it. Raises what it raises."""
    return _OPEN.get(file) or _open(file)


def let_go(files: Iterable[StoredFile]) -> None:
    """Close the descriptors of these files, unless somebody reads; another reader opens them again."""
    with _LOCK:
        for file in files:
            _OPEN.pop(file, None)


def _open(file: StoredFile) -> Descriptor:
    with _LOCK:
        while len(_OPEN) >= _limit():
            del _OPEN[next(iter(_OPEN))]
        return _OPEN.setdefault(file, Descriptor(file))


def _limit() -> int:
    return max(1, min(MOST, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // SHARE))

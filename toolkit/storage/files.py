"""Files opened past the page cache where the file system lets them (O_DIRECT), and what mode they are really in."""

import contextlib
import ctypes
import errno
import mmap
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

BLOCK_BYTES = 4096  # what O_DIRECT's offsets, lengths and addresses are multiples of: enough for any disk in use


@dataclass(frozen=True)
class OpenFile:
    """An open file of `size_bytes`, read in `mode` "direct" or "buffered"."""

    descriptor: int
    size_bytes: int
    mode: str


@contextlib.contextmanager
def open_file(path: Path) -> Iterator[OpenFile]:
    """A file that is there already, open for reading; its pages are dropped from the cache first."""
    reader, direct = open_direct(str(path))
    plain = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(plain, 0, 0, os.POSIX_FADV_DONTNEED)
        mode = "direct" if direct and bypasses_cache(reader, plain) else "buffered"
        yield OpenFile(reader, os.fstat(reader).st_size, mode)
    finally:
        os.close(plain)
        os.close(reader)


def open_direct(name: str) -> tuple[int, bool]:
    """A descriptor for reading, and whether it is a direct one."""
    if hasattr(os, "O_DIRECT"):
        try:
            return os.open(name, os.O_RDONLY | os.O_DIRECT), True
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
    return os.open(name, os.O_RDONLY), False


def bypasses_cache(direct: int, plain: int) -> bool:
    """Whether a read through `direct` leaves the page cache as it was: some file systems take the flag and ignore it.

    `plain` is a buffered descriptor of the same file, none of whose pages should be cached.
    """
    try:
        os.preadv(direct, [mmap.mmap(-1, BLOCK_BYTES)], 0)
    except OSError as error:
        if error.errno == errno.EINVAL:
            return False
        raise
    return not _first_page_cached(plain)


def _first_page_cached(descriptor: int) -> bool:
    view = np.frombuffer(mmap.mmap(descriptor, BLOCK_BYTES, mmap.MAP_SHARED, mmap.PROT_READ), np.uint8)
    resident = ctypes.c_ubyte()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mincore(ctypes.c_void_p(view.ctypes.data), ctypes.c_size_t(BLOCK_BYTES), ctypes.byref(resident)):
        raise OSError(ctypes.get_errno(), "mincore failed")
    return bool(resident.value & 1)

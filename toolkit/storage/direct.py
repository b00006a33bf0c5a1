"""Files opened past the page cache where the file system lets them (O_DIRECT), and what mode they are really in."""

import contextlib
import ctypes
import errno
import mmap
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
from jaxtyping import UInt8

from toolkit.errors import UserError

BLOCK_BYTES = 4096  # what O_DIRECT's offsets, lengths and addresses are multiples of: enough for any disk in use


class ChangedError(UserError):
    """A file is not what it was when it was opened."""


@dataclass(frozen=True)
class Identity:
    """What changes when a file is replaced, cut or written to."""

    device: int
    inode: int
    size_bytes: int
    modified_ns: int

    @classmethod
    def of(cls, file: Path | int) -> Self:
        """Of a path, or an open descriptor. Raises `OSError`."""
        status = os.stat(file)
        return cls(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


@dataclass(frozen=True)
class StoredFile:
    """A file that must stay as it was when it was first looked at."""

    path: Path
    identity: Identity

    @classmethod
    def of(cls, path: Path) -> Self:
        """As it is now. Raises `OSError`."""
        return cls(path, Identity.of(path))

    def content(self, offset: int, size: int) -> UInt8[np.ndarray, " size"]:
        """A part of it, by way of the page cache. Raises `ChangedError` if it is not what it was."""
        self.check()
        data = np.fromfile(self.path, np.uint8, size, offset=offset)
        self.check()
        return data

    def check(self, descriptor: int | None = None) -> None:
        """Raise `ChangedError` if the path, or the open file behind the descriptor, is another than it was."""
        try:
            found = {Identity.of(self.path)} | ({Identity.of(descriptor)} if descriptor is not None else set())
        except OSError as error:
            raise ChangedError(f"{self.path}: gone while it was in use ({error.strerror}); open it again") from error
        if found != {self.identity}:
            raise ChangedError(f"{self.path}: replaced, cut or written to while it was in use; open it again")


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
    try:
        yield OpenFile(reader, os.fstat(reader).st_size, _mode(path, reader if direct else None))
    finally:
        os.close(reader)


@contextlib.contextmanager
def open_unchanged(file: StoredFile) -> Iterator[OpenFile]:
    """`open_file` of a file that must be the one first looked at. Raises `ChangedError` if it is another."""
    file.check()
    with open_file(file.path) as opened:
        file.check(opened.descriptor)
        yield opened


def drop_pages(path: Path) -> None:
    """Have the page cache forget a file that is on the disk, so that the next buffered read is one of the disk."""
    with _plain(path):
        pass


def _mode(path: Path, direct: int | None) -> str:
    with _plain(path) as plain:
        return "direct" if direct is not None and bypasses_cache(direct, plain) else "buffered"


@contextlib.contextmanager
def _plain(path: Path) -> Iterator[int]:
    """A buffered descriptor of a file none of whose pages are cached."""
    plain = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(plain, 0, 0, os.POSIX_FADV_DONTNEED)
        yield plain
    finally:
        os.close(plain)


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
    length = min(BLOCK_BYTES, os.fstat(descriptor).st_size)
    if not length:
        return False
    view = np.frombuffer(mmap.mmap(descriptor, length, mmap.MAP_SHARED, mmap.PROT_READ), np.uint8)
    resident = ctypes.c_ubyte()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mincore(ctypes.c_void_p(view.ctypes.data), ctypes.c_size_t(length), ctypes.byref(resident)):
        raise OSError(ctypes.get_errno(), "mincore failed")
    return bool(resident.value & 1)

"""Files opened past the page cache (O_DIRECT) where the file system allows it, and the mode that was really used."""

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
from toolkit.records import expect_regular

BLOCK_BYTES = 4096  # O_DIRECT needs offsets, lengths and addresses that are multiples of this, on any disk in use


def whole_blocks(nbytes: int) -> int:
    """The number of bytes, rounded up to whole blocks."""
    return -(-nbytes // BLOCK_BYTES) * BLOCK_BYTES


class ChangedError(UserError):
    """A file was changed after it was opened."""


@dataclass(frozen=True)
class Identity:
    """The properties that change when a file is replaced, cut or written to."""

    device: int
    inode: int
    size_bytes: int
    modified_ns: int
    changed_ns: int  # of contents or attributes; no program can set it back, as it can the time of modification

    @classmethod
    def of(cls, file: Path | int) -> Self:
        """The identity of a path or of an open descriptor. Raises `OSError`, also for what is no regular file."""
        status = os.stat(file)
        expect_regular(status)
        return cls(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


@dataclass(frozen=True)
class StoredFile:
    """A file that must not change while it is in use."""

    path: Path
    identity: Identity

    @classmethod
    def of(cls, path: Path) -> Self:
        """The file as it is now. Raises `OSError`."""
        return cls(path, Identity.of(path))

    def content(self, offset: int, size: int) -> UInt8[np.ndarray, " size"]:
        """A part of the file, which does not stay in the page cache. Raises `ChangedError` if the file has changed."""
        self.check()
        with open(self.path, "rb", buffering=0) as stream:
            data = np.fromfile(stream, np.uint8, size, offset=offset)
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # else memory holds it twice
        self.check()
        return data

    def check(self, descriptor: int | None = None) -> None:
        """Raise `ChangedError` if the path, or the open file behind the descriptor, has changed."""
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
    """Open an existing file for reading. Its pages are dropped from the page cache first."""
    reader, direct = open_direct(str(path))
    try:
        yield OpenFile(reader, os.fstat(reader).st_size, _mode(path, reader if direct else None))
    except OSError as error:
        error.filename = error.filename or str(path)  # a mapping fails without one
        raise
    finally:
        os.close(reader)


@contextlib.contextmanager
def open_unchanged(file: StoredFile) -> Iterator[OpenFile]:
    """Open a file as `open_file` does. Raises `ChangedError` if the file has changed."""
    file.check()
    with open_file(file.path) as opened:
        file.check(opened.descriptor)
        yield opened


def drop_pages(path: Path) -> None:
    """Drop a file's pages from the page cache, so that the next buffered read comes from the disk."""
    with _plain(path):
        pass


def _mode(path: Path, direct: int | None) -> str:
    with _plain(path) as plain:
        return "direct" if direct is not None and bypasses_cache(direct, plain) else "buffered"


@contextlib.contextmanager
def _plain(path: Path) -> Iterator[int]:
    """A buffered descriptor of a file, after its pages were dropped from the page cache."""
    plain = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(plain, 0, 0, os.POSIX_FADV_DONTNEED)
        yield plain
    finally:
        os.close(plain)


def open_direct(name: str) -> tuple[int, bool]:
    """Open a file for reading, and say whether its descriptor is a direct one."""
    if hasattr(os, "O_DIRECT"):
        try:
            return os.open(name, os.O_RDONLY | os.O_DIRECT), True
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
    return os.open(name, os.O_RDONLY), False


def bypasses_cache(direct: int, plain: int) -> bool:
    """Whether a read through `direct` bypasses the page cache. Some file systems accept O_DIRECT and ignore it.

    `plain` is a buffered descriptor of the same file; none of its pages should be cached.
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

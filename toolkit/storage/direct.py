"""Files opened past the page cache (O_DIRECT) where the file system allows it, and the mode that was really used."""

import contextlib
import ctypes
import errno
import mmap
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self, TypeVar

import numpy as np
from jaxtyping import UInt8

from toolkit.errors import UserError
from toolkit.records import expect_regular

Result = TypeVar("Result")
BLOCK_BYTES = 4096  # O_DIRECT needs offsets, lengths and addresses that are multiples of this, on any disk in use


def whole_blocks(nbytes: int) -> int:
    """The number of bytes, rounded up to whole blocks."""
    return -(-nbytes // BLOCK_BYTES) * BLOCK_BYTES


class ChangedError(UserError):
    """A file was changed after it was opened."""


@dataclass(frozen=True)
class Identity:
    """The properties that change when a file is replaced, cut or written to.

    Both times also change without that: `touch` sets the first, chmod and a new hard link change the second. A writer
    can set the first one back, but no program the second.
    """

    device: int
    inode: int
    size_bytes: int
    modified_ns: int
    changed_ns: int  # of contents or attributes

    @classmethod
    def of(cls, file: Path | int) -> Self:
        """The identity of a path or of an open descriptor. Raises `OSError`, also for what is no regular file."""
        status = os.stat(file)
        expect_regular(status)
        return cls(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)

    def is_place_of(self, other: Self) -> bool:
        """Whether both are of one file of one size, at whatever times."""
        return (self.device, self.inode, self.size_bytes) == (other.device, other.inode, other.size_bytes)


@dataclass(frozen=True)
class StoredFile:
    """A file that must not be replaced, cut or rewritten while it is in use.

    `is_whole` compares its contents with checksums. It is asked when the times alone have changed, as after chmod,
    touch or a new hard link. Without it the time of modification must stay, and only chmod and links are allowed.
    """

    path: Path
    identity: Identity
    is_whole: Callable[[], bool] | None = field(default=None, compare=False)
    _last: list[Identity] = field(default_factory=list, init=False, compare=False, repr=False)  # one: the latest

    def __post_init__(self):
        """The first check compares with the identity."""
        self._last.append(self.identity)

    @classmethod
    def of(cls, path: Path, is_whole: Callable[[], bool] | None = None) -> Self:
        """The file as it is now. Raises `OSError`."""
        return cls(path, Identity.of(path), is_whole)

    def content(self, offset: int, size: int) -> UInt8[np.ndarray, " size"]:
        """A part of the file, which does not stay in the page cache. Raises `ChangedError` if the file has changed."""
        self.check()
        return self.unchanged(lambda: uncached(self.path, offset, size))

    def unchanged(self, read: Callable[[], Result], descriptor: Callable[[], int] | None = None) -> Result:
        """The result of `read`, which is called again if the file's times changed meanwhile.

        `descriptor` gives that of the open file. Raises what `read` raises, and `ChangedError` if the file has changed.
        """
        while True:
            before = self._last[0]
            try:
                result = read()
            except OSError:
                self.check(descriptor and descriptor())  # a cut file gives a short read: name the cause
                raise
            self.check(descriptor and descriptor())
            if self._last[0] == before:
                return result

    def check(self, descriptor: int | None = None) -> None:
        """Raise `ChangedError` if the path, or the open file behind the descriptor, has changed."""
        try:
            now = Identity.of(self.path)
            same = descriptor is None or now.is_place_of(Identity.of(descriptor))
            if same and (now == self._last[0] or self._has_its_contents(now)):
                self._last[0] = now
                return
        except OSError as error:
            raise ChangedError(f"{self.path}: gone while it was in use ({error.strerror}); open it again") from error
        raise ChangedError(f"{self.path}: replaced, cut or written to while it was in use; open it again")

    def _has_its_contents(self, now: Identity) -> bool:
        if not now.is_place_of(self.identity):
            return False
        if self.is_whole is None:
            return now.modified_ns == self.identity.modified_ns
        return self.is_whole() and Identity.of(self.path) == now


def uncached(path: Path, offset: int, size: int) -> UInt8[np.ndarray, " size"]:
    """A part of a file, which does not stay in the page cache. Raises `OSError`."""
    with open(path, "rb", buffering=0) as stream:
        data = np.fromfile(stream, np.uint8, size, offset=offset)
        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # else memory holds it twice
    return data


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

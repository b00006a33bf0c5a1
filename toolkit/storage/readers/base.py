"""What all readers share: ranges are cut into chunks, read in the order asked for, and checked afterwards."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import ClassVar, Protocol, Self

import numpy as np
from jaxtyping import Int64

from toolkit.errors import UserError
from toolkit.storage.files import BLOCK_BYTES, StoredFile


class Range(Protocol):
    """A part of a shard: a `Layer`, an `OpRun`, or anything else that has these."""

    shard: str
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Chunks:
    """Reads of one file: `sizes[i]` bytes from `offsets[i]`, to `places[i]` of the target."""

    offsets: Int64[np.ndarray, " chunks"]
    sizes: Int64[np.ndarray, " chunks"]
    places: Int64[np.ndarray, " chunks"]


class Reader(ABC):
    """Reads runs of files into a buffer. One read at a time has the whole disk; further ones wait their turn.

    `mode` is what really happens: "direct" (O_DIRECT, past the page cache), "buffered" (through it, where the file
    system knows no other way), "gds" (from the disk into GPU memory), "compat" (into GPU memory by way of the host's).
    """

    name: ClassVar[str]
    mode: str

    def __init__(self, files: Mapping[str, StoredFile], chunk_bytes: int):
        if chunk_bytes < BLOCK_BYTES or chunk_bytes % BLOCK_BYTES:
            raise UserError(f"chunk of {chunk_bytes} bytes: expected a multiple of {BLOCK_BYTES}")
        self.files = files
        self.chunk_bytes = chunk_bytes
        self._turns = ThreadPoolExecutor(1, "storage-reader")

    def submit(self, ranges: Sequence[Range], target) -> Future[None]:
        """Start reading ranges into `target`, one after the other from its first byte; the future ends with them.

        `target` is a byte array on a page boundary (`aligned_buffer`), or what the reader says. Raises `UserError` if
        it is too small, or out of line; the future raises `ChangedError` if a file was replaced or cut meanwhile, and
        `OSError` if the disk fails.
        """
        self._check(ranges, target)
        return self._turns.submit(self._read, list(ranges), target)

    def read(self, ranges: Sequence[Range], target) -> None:
        """Read ranges into `target` and wait. Raises what `submit` and its future do."""
        self.submit(ranges, target).result()

    def close(self) -> None:
        """Finish what was started, drop what was not, and close the files."""
        self._turns.shutdown(cancel_futures=True)

    def __enter__(self) -> Self:
        """The reader itself."""
        return self

    def __exit__(self, *error) -> None:
        """Close it."""
        self.close()

    @abstractmethod
    def _transfer(self, shard: str, chunks: Chunks, target) -> None:
        """Read chunks of one file; `OSError` if that fails or falls short."""

    @abstractmethod
    def _descriptor(self, shard: str) -> int:
        """Of the open file."""

    def _check(self, ranges: Sequence[Range], target) -> None:
        total = sum(range_.nbytes for range_ in ranges)
        if target.nbytes < total:
            raise UserError(f"a buffer of {target.nbytes} bytes for ranges of {total}: expected one of as many")
        if _address(target) % BLOCK_BYTES:
            raise UserError(f"a buffer that does not start on {BLOCK_BYTES} bytes: make it with `aligned_buffer`")
        if missing := {range_.shard for range_ in ranges} - self.files.keys():
            raise UserError(f"shard {min(missing)} was not opened by this reader: open one for its variant")

    def _read(self, ranges: list[Range], target) -> None:
        place = 0
        for range_ in ranges:
            file = self.files[range_.shard]
            try:
                self._transfer(range_.shard, _cut(range_, place, self.chunk_bytes), target)
            except OSError:
                file.check(self._descriptor(range_.shard))  # a file that was cut falls short: say so rather
                raise
            file.check(self._descriptor(range_.shard))
            place += range_.nbytes


def _cut(range_: Range, place: int, chunk_bytes: int) -> Chunks:
    starts = np.arange(0, range_.nbytes, chunk_bytes, dtype=np.int64)
    sizes = np.minimum(range_.nbytes - starts, chunk_bytes)
    return Chunks(range_.offset + starts, sizes, place + starts)


def _address(target) -> int:
    return target.ctypes.data if isinstance(target, np.ndarray) else target.data_ptr()


def common_mode(modes: Iterable[str]) -> str:
    """The mode of a reader whose files have these: "direct" only if all are."""
    found = set(modes)
    return found.pop() if len(found) == 1 else "buffered"

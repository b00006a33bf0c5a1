"""What all readers share: ranges are read in the order asked for, one read at a time, and files checked afterwards."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import groupby
from typing import ClassVar, Protocol, Self

import numpy as np
from jaxtyping import Int64, UInt8
from torch import Tensor

from toolkit.errors import UserError
from toolkit.storage.direct import BLOCK_BYTES, StoredFile, open_unchanged

Target = UInt8[np.ndarray, " bytes"] | UInt8[Tensor, " bytes"]


class Range(Protocol):
    """A part of a shard, in whole blocks: a `Layer`, an `OpRun`, or anything else that has these."""

    shard: str
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Chunks:
    """Reads of one file: `sizes[i]` bytes from `offsets[i]`, to `places[i]` of the target."""

    offsets: Int64[np.ndarray, " chunks"]
    sizes: Int64[np.ndarray, " chunks"]
    places: Int64[np.ndarray, " chunks"]

    @classmethod
    def of(cls, ranges: Sequence[Range], place: int, chunk_bytes: int) -> Self:
        """Ranges that go one after the other from `place` on; the last chunk of each is as long as what is left."""
        offsets, sizes = np.array([(range_.offset, range_.nbytes) for range_ in ranges], np.int64).T
        counts = -(-sizes // chunk_bytes)
        owner = np.repeat(np.arange(len(ranges)), counts)
        within = (np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)) * chunk_bytes
        places = place + np.cumsum(sizes) - sizes
        return cls(offsets[owner] + within, np.minimum(sizes[owner] - within, chunk_bytes), places[owner] + within)


class Reader(ABC):
    """Reads ranges of files into a buffer. One read at a time has the whole disk; further ones wait their turn.

    `mode` is what really happens: "direct" (O_DIRECT, past the page cache), "buffered" (through it, where the file
    system knows no other way), "gds" (from the disk into GPU memory), "compat" (into GPU memory by way of the host's).
    """

    name: ClassVar[str]
    into: ClassVar[str] = "dram"  # the tier whose memory it reads into
    mode: str

    def __init__(self, files: Mapping[str, StoredFile], chunk_bytes: int):
        if chunk_bytes < BLOCK_BYTES or chunk_bytes % BLOCK_BYTES:
            raise UserError(f"chunk of {chunk_bytes} bytes: expected a multiple of {BLOCK_BYTES}")
        self.files = dict(files)
        self.chunk_bytes = chunk_bytes
        with ExitStack() as stack:
            self.mode = self._open(stack)
            self._opened = stack.pop_all()
        self._turns = ThreadPoolExecutor(1, "storage-reader")

    def submit(self, ranges: Sequence[Range], target: Target) -> Future[None]:
        """Start reading ranges into `target`, one after the other from its first byte; the future ends with them.

        `target` starts on a page (`aligned_buffer`). Raises `UserError` if it is too small, out of line, or not of the
        reader's kind. The future raises `ChangedError` if a file was replaced or cut meanwhile, and `OSError` if the
        disk fails; what is in `target` then is worth nothing.
        """
        self._check(ranges, target)
        return self._turns.submit(self._read, list(ranges), target)

    def read(self, ranges: Sequence[Range], target: Target) -> None:
        """Read ranges into `target` and wait. Raises what `submit` and its future do."""
        self.submit(ranges, target).result()

    def close(self) -> None:
        """Finish the read that is under way, drop those that wait, and close the files."""
        self._turns.shutdown(cancel_futures=True)
        self._opened.close()

    def __enter__(self) -> Self:
        """The reader itself."""
        return self

    def __exit__(self, *error) -> None:
        """Close it."""
        self.close()

    @abstractmethod
    def _open(self, stack: ExitStack) -> str:
        """Open the files, put what closes them on the stack, and return the mode."""

    @abstractmethod
    def _descriptor(self, shard: str) -> int:
        """Of the open file."""

    @abstractmethod
    def _transfer(self, shard: str, ranges: Sequence[Range], place: int, target: Target) -> None:
        """Read ranges of one shard to `target[place:]`; `OSError` if that fails or falls short.

        Nothing is under way when it returns, or raises.
        """

    def _check(self, ranges: Sequence[Range], target: Target) -> None:
        total = sum(range_.nbytes for range_ in ranges)
        if target.nbytes < total:
            raise UserError(f"a buffer of {target.nbytes} bytes for ranges of {total}: expected one as large")
        if _address(target) % BLOCK_BYTES:
            raise UserError(f"a buffer that does not start on {BLOCK_BYTES} bytes: make it with `aligned_buffer`")
        if any(range_.offset % BLOCK_BYTES or range_.nbytes % BLOCK_BYTES for range_ in ranges):
            raise UserError(f"a range that is no run of whole blocks of {BLOCK_BYTES} bytes: none else can be direct")
        if missing := {range_.shard for range_ in ranges} - self.files.keys():
            raise UserError(f"shard {min(missing)} was not opened by this reader: open one for its variant")

    def _read(self, ranges: list[Range], target: Target) -> None:
        place = 0
        for shard, grouped in groupby(ranges, key=lambda range_: range_.shard):
            group = list(grouped)
            try:
                self._transfer(shard, group, place, target)
            except OSError:
                self.files[shard].check(self._descriptor(shard))  # a file that was cut falls short: say that instead
                raise
            self.files[shard].check(self._descriptor(shard))
            place += sum(range_.nbytes for range_ in group)


class HostReader(Reader):
    """A reader of descriptors into host memory, chunk by chunk. `target` is a NumPy byte array."""

    def _open(self, stack: ExitStack) -> str:
        self._files = {shard: stack.enter_context(open_unchanged(file)) for shard, file in self.files.items()}
        direct = all(file.mode == "direct" for file in self._files.values())
        return "direct" if direct else "buffered"

    def _descriptor(self, shard: str) -> int:
        return self._files[shard].descriptor

    def _check(self, ranges: Sequence[Range], target: Target) -> None:
        if not isinstance(target, np.ndarray):
            raise UserError(f"reader {self.name!r} reads into host memory: expected a NumPy array (`aligned_buffer`)")
        super()._check(ranges, target)

    def _transfer(self, shard: str, ranges: Sequence[Range], place: int, target: Target) -> None:
        self._fetch(self._descriptor(shard), Chunks.of(ranges, place, self.chunk_bytes), target)

    @abstractmethod
    def _fetch(self, descriptor: int, chunks: Chunks, target: UInt8[np.ndarray, " bytes"]) -> None:
        """Read chunks of one file; `OSError` if one fails or falls short. Nothing is under way afterwards."""


def at_least_one(what: str, count: int) -> int:
    """The count. Raises `UserError` if it is less."""
    if count < 1:
        raise UserError(f"{what} {count}: expected at least 1")
    return count


def _address(target: Target) -> int:
    return target.ctypes.data if isinstance(target, np.ndarray) else target.data_ptr()

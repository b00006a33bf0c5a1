"""The base of all readers: reads are done one at a time, in the order asked for, and files are checked afterwards."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import groupby
from typing import ClassVar, Protocol, Self

import numpy as np
from jaxtyping import Int64, UInt8
from torch import Tensor

from toolkit.errors import UserError
from toolkit.storage.direct import BLOCK_BYTES, StoredFile, open_unchanged

Target = UInt8[np.ndarray, " bytes"] | UInt8[Tensor, " bytes"]


class Blocks(Protocol):
    """Whole blocks of a shard: a `Layer`, a `BlockRun`, a `Range`, or anything else with these fields."""

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
    def of(cls, ranges: Sequence[Blocks], place: int, chunk_bytes: int) -> Self:
        """Cut ranges into chunks. The ranges fill the target one after the other from `place` on."""
        offsets, sizes = np.array([(range_.offset, range_.nbytes) for range_ in ranges], np.int64).T
        return cls(offsets, sizes, place + np.cumsum(sizes) - sizes).cut(chunk_bytes)

    def cut(self, chunk_bytes: int) -> Self:
        """The same bytes in chunks of at most so many bytes."""
        if len(self.sizes) and self.sizes.min() > 0 and self.sizes.max() <= chunk_bytes:
            return self  # as they are, which a burst of short reads need not wait for
        counts = -(-self.sizes // chunk_bytes)
        owner = np.repeat(np.arange(len(counts)), counts)
        within = (np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)) * chunk_bytes
        sizes = np.minimum(self.sizes[owner] - within, chunk_bytes)
        return type(self)(self.offsets[owner] + within, sizes, self.places[owner] + within)

    def at(self, index: Int64[np.ndarray, " some"] | slice) -> Self:
        """Some of them."""
        return type(self)(self.offsets[index], self.sizes[index], self.places[index])

    def joined(self) -> Self:
        """The same bytes, where chunks that follow each other both in the file and in the target are one."""
        ends = [place + self.sizes for place in (self.offsets, self.places)]
        breaks = (self.offsets[1:] != ends[0][:-1]) | (self.places[1:] != ends[1][:-1])
        firsts = np.flatnonzero(np.concatenate([[True], breaks]))[: len(self.sizes)]
        sizes = np.add.reduceat(self.sizes, firsts) if len(firsts) else self.sizes
        return type(self)(self.offsets[firsts], sizes, self.places[firsts])


class Reader(ABC):
    """Reads ranges of files into a buffer. One read at a time has the whole disk; the others wait for it.

    `mode` says how reads are really done: "direct" (O_DIRECT, past the page cache), "buffered" (through the page cache,
    where the file system allows nothing else), "gds" (from the disk into GPU memory), or "compat" (into GPU memory
    through the host's memory).
    """

    name: ClassVar[str]
    into: ClassVar[str] = "dram"  # the tier of the memory that is read into
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

    def submit(
        self, ranges: Sequence[Blocks], target: Target, within: AbstractContextManager | None = None
    ) -> Future[None]:
        """Start to read ranges into `target`, one behind the other from its first byte. The future ends with the read.

        `target` starts on a page (`aligned_buffer`). The reader's own thread enters `within` when it begins this read
        and leaves it when the read has ended: a recorder's span there takes the time of the read and nothing else.
        Raises `UserError` if `target` is too small, not aligned, or not memory that this reader can fill. The future
        raises `ChangedError` if a file was replaced or cut meanwhile, and `OSError` if the disk fails; the contents of
        `target` are undefined then.
        """
        self._check(ranges, target)
        return self._turns.submit(self._read, list(ranges), target, within or nullcontext())

    def read(self, ranges: Sequence[Blocks], target: Target) -> None:
        """Read ranges into `target` and wait. Raises what `submit` and its future do."""
        self.submit(ranges, target).result()

    def close(self) -> None:
        """Finish the read that is under way, cancel those that wait, and close the files."""
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
        """Open the files, register their closing on the stack, and return the mode."""

    @abstractmethod
    def _descriptor(self, shard: str) -> int:
        """The descriptor of the open file."""

    @abstractmethod
    def _transfer(self, shard: str, ranges: Sequence[Blocks], place: int, target: Target) -> None:
        """Read ranges of one shard to `target[place:]`. Raises `OSError` if a read fails or falls short.

        No read is under way when this returns or raises.
        """

    def _check(self, ranges: Sequence[Blocks], target: Target) -> None:
        total = sum(range_.nbytes for range_ in ranges)
        if target.nbytes < total:
            raise UserError(f"a buffer of {target.nbytes} bytes for ranges of {total}: expected one as large")
        if _address(target) % BLOCK_BYTES:
            raise UserError(f"a buffer that does not start on {BLOCK_BYTES} bytes: make it with `aligned_buffer`")
        if any(range_.offset % BLOCK_BYTES or range_.nbytes % BLOCK_BYTES for range_ in ranges):
            raise UserError(
                f"a range that is no run of whole blocks of {BLOCK_BYTES} bytes: make it with `OpRun.range`"
            )
        if missing := {range_.shard for range_ in ranges} - self.files.keys():
            raise UserError(f"shard {min(missing)} was not opened by this reader: open one for its variant")

    def _read(self, ranges: list[Blocks], target: Target, within: AbstractContextManager) -> None:
        with within:
            self._read_shards(ranges, target)

    def _read_shards(self, ranges: list[Blocks], target: Target) -> None:
        place = 0
        for shard, grouped in groupby(ranges, key=lambda range_: range_.shard):
            group = list(grouped)
            with self._unchanged(shard):
                self._transfer(shard, group, place, target)
            place += sum(range_.nbytes for range_ in group)

    @contextmanager
    def _unchanged(self, shard: str) -> Iterator[None]:
        """Raise `ChangedError` if the shard has changed by the end, also instead of an `OSError`, which it names."""
        try:
            yield
        except OSError as error:
            self.files[shard].check(self._descriptor(shard))  # a cut file gives a short read: name the cause
            if error.errno and not error.filename:
                error.filename = str(self.files[shard].path)  # the system knows a descriptor only
            raise
        self.files[shard].check(self._descriptor(shard))


class HostReader(Reader):
    """Reads into host memory, chunk by chunk. `target` is a NumPy byte array."""

    def submit_chunks(
        self,
        shard: str,
        chunks: Chunks,
        target: UInt8[np.ndarray, " bytes"],
        within: AbstractContextManager | None = None,
    ) -> Future[None]:
        """Start to read chunks of one shard, each to its own place of `target`, cut to `chunk_bytes`.

        As `submit`, without an object for each of them: for thousands of short reads. Offsets, sizes, places and the
        target's address are multiples of `BLOCK_BYTES`. Raises what `submit` does, and so does the future.
        """
        self._check_chunks(shard, chunks, target)
        return self._turns.submit(self._read_chunks, shard, chunks.cut(self.chunk_bytes), target, within)

    def read_chunks(self, shard: str, chunks: Chunks, target: UInt8[np.ndarray, " bytes"]) -> None:
        """Read chunks and wait. Raises what `submit_chunks` and its future do."""
        self.submit_chunks(shard, chunks, target).result()

    def _read_chunks(self, shard: str, chunks: Chunks, target: np.ndarray, within: AbstractContextManager | None):
        with within or nullcontext(), self._unchanged(shard):
            self._fetch(self._descriptor(shard), chunks, target)

    def _check_chunks(self, shard: str, chunks: Chunks, target: np.ndarray) -> None:
        """Refuse what a direct read cannot do, or what would be written beyond the target."""
        if shard not in self.files:
            raise UserError(f"shard {shard} was not opened by this reader: open one for its variant")
        bits = np.bitwise_or.reduce(chunks.offsets | chunks.sizes | chunks.places) | _address(target)
        if bits % BLOCK_BYTES or bits < 0:  # the lowest bits and the sign of all of them
            raise UserError(f"chunks or a target that are no whole blocks of {BLOCK_BYTES} bytes: expected multiples")
        if len(chunks.sizes) and (end := int((chunks.places + chunks.sizes).max())) > target.nbytes:
            raise UserError(f"a buffer of {target.nbytes} bytes for chunks up to byte {end}: expected one as large")

    def _open(self, stack: ExitStack) -> str:
        self._files = {shard: stack.enter_context(open_unchanged(file)) for shard, file in self.files.items()}
        direct = all(file.mode == "direct" for file in self._files.values())
        return "direct" if direct else "buffered"

    def _descriptor(self, shard: str) -> int:
        return self._files[shard].descriptor

    def _check(self, ranges: Sequence[Blocks], target: Target) -> None:
        if not isinstance(target, np.ndarray):
            raise UserError(f"reader {self.name!r} reads into host memory: expected a NumPy array (`aligned_buffer`)")
        super()._check(ranges, target)

    def _transfer(self, shard: str, ranges: Sequence[Blocks], place: int, target: Target) -> None:
        self._fetch(self._descriptor(shard), Chunks.of(ranges, place, self.chunk_bytes), target)

    @abstractmethod
    def _fetch(self, descriptor: int, chunks: Chunks, target: UInt8[np.ndarray, " bytes"]) -> None:
        """Read chunks of one file. Raises `OSError` if one fails or falls short. No read is under way afterwards."""


def at_least_one(what: str, count: int) -> int:
    """The count itself. Raises `UserError` if it is less than one."""
    if count < 1:
        raise UserError(f"{what} {count}: expected at least 1")
    return count


def _address(target: Target) -> int:
    return target.ctypes.data if isinstance(target, np.ndarray) else target.data_ptr()

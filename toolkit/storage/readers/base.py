"""The base of all readers: reads run one at a time, in the order of the requests, and files are checked afterwards."""

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, ClassVar

import numpy as np
from jaxtyping import UInt8

from toolkit.errors import UserError
from toolkit.storage import descriptors
from toolkit.storage.chunks import Chunks
from toolkit.storage.direct import BLOCK_BYTES, StoredFile, open_unchanged

Target = Any  # bytes: a NumPy array, or a tensor in a GPU's memory


class Reader(AbstractContextManager):
    """Reads chunks of files into a buffer. One read at a time has the whole disk; the others wait for it.

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
        self, chunks: Sequence[Chunks], target: Target, within: AbstractContextManager | None = None
    ) -> Future[None]:
        """Start to read chunks, each to its own place of `target`. The future ends with the read.

        Offsets, sizes, places and the target's address are multiples of `BLOCK_BYTES` (`aligned_buffer`). The reader's
        own thread enters `within` when it begins this read and leaves it when the read has ended: a recorder's span
        there takes the time of the read and nothing else. Raises `UserError` if `target` is too small, not aligned, or
        not memory that this reader can fill. The future raises `ChangedError` if a file was replaced or cut meanwhile,
        and `OSError` if the disk fails; the contents of `target` are undefined then.
        """
        self._check(chunks, target)
        return self._turns.submit(self._read, list(chunks), target, within or nullcontext())

    def read(self, chunks: Sequence[Chunks], target: Target) -> None:
        """Read chunks and wait. Raises what `submit` and its future do."""
        self.submit(chunks, target).result()

    def close(self) -> None:
        """Finish the read that is under way, cancel those that wait, and close the files."""
        self._turns.shutdown(cancel_futures=True)
        self._opened.close()

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
    def _fetch(self, chunks: Chunks, target: Target) -> None:
        """Read chunks of one shard. Raises `OSError` if one fails or falls short.

        No read is under way when this returns or raises.
        """

    def _check(self, chunks: Sequence[Chunks], target: Target) -> None:
        """Refuse what a direct read cannot do, or what would be written beyond the target."""
        for part in chunks:
            if part.shard not in self.files:
                raise UserError(f"shard {part.shard} was not opened by this reader: open one for its variant")
            bits = np.bitwise_or.reduce(part.offsets | part.sizes | part.places, initial=_address(target))
            if bits % BLOCK_BYTES or bits < 0:  # the lowest bits and the sign of all of them
                raise UserError(f"reads or a buffer that are no whole blocks of {BLOCK_BYTES} bytes")
            if len(part.sizes) and (end := int((part.places + part.sizes).max())) > target.nbytes:
                raise UserError(f"a buffer of {target.nbytes} bytes for reads up to byte {end}: expected one as large")

    def _read(self, chunks: list[Chunks], target: Target, within: AbstractContextManager) -> None:
        with within:
            for part in chunks:
                with self._named(part.shard):
                    read, descriptor = partial(self._fetch, part, target), partial(self._descriptor, part.shard)
                    self.files[part.shard].unchanged(read, descriptor)

    @contextmanager
    def _named(self, shard: str) -> Iterator[None]:
        """Name the shard in an `OSError` of the block: the system knows a descriptor only."""
        try:
            yield
        except OSError as error:
            if error.errno and not error.filename:
                error.filename = str(self.files[shard].path)
            raise


class HostReader(Reader):
    """Reads into host memory, in chunks of at most `chunk_bytes`. `target` is a NumPy byte array."""

    _held: descriptors.Descriptor | None = None

    def _open(self, stack: ExitStack) -> str:
        stack.callback(self._let_go)
        modes = set()
        for file in self.files.values():
            with open_unchanged(file) as opened:
                modes.add(opened.mode)
        return "direct" if modes <= {"direct"} else "buffered"

    def _descriptor(self, shard: str) -> int:
        self._held = descriptors.opened(self.files[shard])  # it stays open until another one is asked for
        return self._held.number

    def _let_go(self) -> None:
        self._held = None
        descriptors.let_go(self.files.values())

    def _check(self, chunks: Sequence[Chunks], target: Target) -> None:
        if not isinstance(target, np.ndarray):
            raise UserError(f"reader {self.name!r} reads into host memory: expected a NumPy array (`aligned_buffer`)")
        super()._check(chunks, target)

    def _fetch(self, chunks: Chunks, target: Target) -> None:
        self._read_all(self._descriptor(chunks.shard), chunks.cut(self.chunk_bytes), target)

    @abstractmethod
    def _read_all(self, descriptor: int, chunks: Chunks, target: UInt8[np.ndarray, " bytes"]) -> None:
        """Read chunks of one file, as `_fetch` does."""


def at_least_one(what: str, count: int) -> int:
    """The count itself. Raises `UserError` if it is less than one."""
    if count < 1:
        raise UserError(f"{what} {count}: expected at least 1")
    return count


def _address(target: Target) -> int:
    return target.ctypes.data if isinstance(target, np.ndarray) else target.data_ptr()

"""Reading a file past the page cache, by many threads at once: the rate of the disk itself.

Reads use O_DIRECT where the file system takes it, as in FLASH (appendix B). Some file systems refuse it, and some
accept the flag and still fill the page cache. Reads are buffered there, and the mode says so.
"""

import contextlib
import itertools
import os
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Int64, UInt8

from toolkit.errors import UserError
from toolkit.files import check_space, disk_trouble_told
from toolkit.storage import direct
from toolkit.storage.buffers import aligned_buffer
from toolkit.storage.chunks import read_ranges, warm_up
from toolkit.storage.direct import OpenFile

PATTERNS = ("random", "sequential")
BATCH = 16  # reads between two looks at the clock
WRITE_BYTES = 16 << 20


@dataclass(frozen=True)
class Reading:
    """One pass: `bytes` in all, `gb_s` the sum over its threads of bytes over the time to their last read."""

    bytes: int
    gb_s: float


@contextlib.contextmanager
def scratch_file(folder: Path, size_bytes: int) -> Iterator[OpenFile]:
    """A file of random bytes on the disk that holds `folder`, open for reading.

    It has no name once it is open, so nothing is left behind however the process ends. Raises `UserError` if the folder
    does not exist, if there is too little space, and for other trouble with the disk, also inside the block.
    """
    if not folder.is_dir():
        raise UserError(f"no folder {folder} for the test file: name one that exists, on the disk to be measured")
    check_space(folder, size_bytes)
    with disk_trouble_told(folder), contextlib.ExitStack() as stack:
        writer, name = tempfile.mkstemp(prefix=".probe-", dir=folder)
        stack.callback(os.close, writer)
        try:
            reader, bypassed = direct.open_direct(name)
        finally:
            os.unlink(name)
        stack.callback(os.close, reader)
        _fill(writer, size_bytes)
        yield OpenFile(
            reader, size_bytes, "direct" if bypassed and direct.bypasses_cache(reader, writer) else "buffered"
        )


def read(file: OpenFile, pattern: str, chunk_bytes: int, threads: int, seconds: float, seed: int = 0) -> Reading:
    """Read chunks with so many threads for about `seconds`, each thread waiting for one chunk at a time.

    "random": the file's chunks in a random order, dealt to the threads; "sequential": each walks its own stretch.
    Direct reads start over when a thread is through; buffered ones stop there, since the second round would come from
    memory. Chunks are multiples of 4096 bytes, and the file has one or more for each thread. Raises `OSError` if a read
    fails.
    """
    shares = _shares(file, pattern, chunk_bytes, threads, seed)
    if file.mode == "buffered":
        os.posix_fadvise(file.descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        advice = os.POSIX_FADV_RANDOM if pattern == "random" else os.POSIX_FADV_SEQUENTIAL
        os.posix_fadvise(file.descriptor, 0, 0, advice)
    buffer = aligned_buffer(threads * chunk_bytes).reshape(threads, chunk_bytes)
    warm_up()
    start = threading.Barrier(threads)

    def work(offsets: Int64[np.ndarray, " chunks"], target: UInt8[np.ndarray, " bytes"]) -> tuple[int, float]:
        start.wait()
        count, elapsed_s = _read_share(file, offsets, target, seconds)
        return count * chunk_bytes, elapsed_s

    with ThreadPoolExecutor(threads) as pool:  # leaving it waits for the threads, after an interruption too
        results = list(pool.map(work, shares, buffer))
    return Reading(sum(done for done, _ in results), sum(done / elapsed_s for done, elapsed_s in results) / 1e9)


def _read_share(file: OpenFile, offsets: np.ndarray, target: np.ndarray, seconds: float) -> tuple[int, float]:
    """How many chunks were read, and the time to the last one. The clock is read after every `BATCH` chunks."""
    rounds = itertools.repeat(offsets) if file.mode == "direct" else [offsets]
    batches = (share[first : first + BATCH] for share in rounds for first in range(0, len(share), BATCH))
    sizes, places = np.full(BATCH, target.nbytes), np.zeros(BATCH, np.int64)
    count, began = 0, time.perf_counter()
    for batch in batches:
        read_ranges(file.descriptor, batch, sizes[: len(batch)], places[: len(batch)], target)
        count += len(batch)
        elapsed_s = time.perf_counter() - began
        if elapsed_s >= seconds:
            break
    return count, elapsed_s


def _shares(file: OpenFile, pattern: str, chunk_bytes: int, threads: int, seed: int) -> list[np.ndarray]:
    """The offsets that each thread reads."""
    chunks = np.arange(file.size_bytes // chunk_bytes) * chunk_bytes
    if pattern == "sequential":
        return np.array_split(chunks, threads)
    order = np.random.default_rng(seed).permutation(chunks)
    return [order[index::threads] for index in range(threads)]


def _fill(descriptor: int, size_bytes: int) -> None:
    """Random bytes (no file system can compress or share them), on the disk and out of the page cache."""
    generator = np.random.default_rng(0)
    written = 0
    while written < size_bytes:
        written += os.write(descriptor, generator.bytes(min(WRITE_BYTES, size_bytes - written)))
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)

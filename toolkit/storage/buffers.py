"""Memory that disks can write into directly: aligned, and in huge pages where the system has them.

Ordinary memory consists of scattered pages of 4 KiB, and the disk's driver handles each page of a direct read by
itself. A huge page is handled as one. `benchmarks/storage_fio.py` shows the difference.
"""

import contextlib
import mmap

import numpy as np
from jaxtyping import UInt8

HUGE_PAGE_BYTES = 2 << 20


def buffer_bytes(nbytes: int) -> int:
    """The memory that a buffer of so many bytes takes: whole huge pages."""
    return -(-nbytes // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES


def aligned_buffer(nbytes: int) -> UInt8[np.ndarray, " nbytes"]:
    """Zeroed bytes, all touched, that start on a huge page and so on a block."""
    padded = buffer_bytes(nbytes)
    private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
    region = mmap.mmap(-1, padded + HUGE_PAGE_BYTES, **private)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages: ordinary pages are only slower
            region.madvise(mmap.MADV_HUGEPAGE)
    whole = np.frombuffer(region, np.uint8)
    start = -whole.ctypes.data % HUGE_PAGE_BYTES
    buffer = whole[start : start + nbytes]
    buffer[:: mmap.PAGESIZE] = 0  # the system gives zeros
    return buffer

"""Memory that disks can write into directly: aligned, and in huge pages where the system has them.

A direct read into ordinary memory is one piece of work per 4 KiB page for the disk's driver, since the pages lie
scattered; into a huge page it is one per read. `benchmarks/storage_fio.py` shows what that is worth.
"""

import contextlib
import mmap

import numpy as np
from jaxtyping import UInt8

HUGE_PAGE_BYTES = 2 << 20


def buffer_bytes(nbytes: int) -> int:
    """What a buffer of so many bytes really takes: whole huge pages."""
    return -(-nbytes // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES


def aligned_buffer(nbytes: int) -> UInt8[np.ndarray, " nbytes"]:
    """Zeroed bytes that start on a huge page (so on a page and a block, too), all of them touched."""
    padded = buffer_bytes(nbytes)
    private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
    region = mmap.mmap(-1, padded + HUGE_PAGE_BYTES, **private)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel built without them: ordinary pages do the same, slower
            region.madvise(mmap.MADV_HUGEPAGE)
    whole = np.frombuffer(region, np.uint8)
    start = -whole.ctypes.data % HUGE_PAGE_BYTES
    buffer = whole[start : start + nbytes]
    buffer[:] = 0
    return buffer

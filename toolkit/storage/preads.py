"""Many positioned reads in one call that holds no interpreter lock: 32 threads of 32 KiB reads would wait for it."""

import os
from functools import cache

import numpy as np
from jaxtyping import Int64, UInt8


def read_ranges(
    descriptor: int,
    offsets: Int64[np.ndarray, " ranges"],
    sizes: Int64[np.ndarray, " ranges"],
    places: Int64[np.ndarray, " ranges"],
    target: UInt8[np.ndarray, " bytes"],
) -> None:
    """Read `sizes[i]` bytes at the file's `offsets[i]` to `target[places[i]:]`, one range after the other.

    For a direct descriptor, offsets, sizes, places and `target`'s address must be multiples of the file system's block.
    Raises `ValueError` for ranges that do not lie within `target`, and `OSError` when a read fails or falls short.
    """
    if not len(offsets) == len(sizes) == len(places):
        raise ValueError(
            f"{len(offsets)} offsets, {len(sizes)} sizes and {len(places)} places: expected as many of each"
        )
    if len(sizes) and (min(sizes.min(), places.min()) < 0 or (places + sizes).max() > target.nbytes):
        raise ValueError(f"a range does not lie within the target's {target.nbytes} bytes")
    read, done = _compiled(), 0
    while (done := done + read(descriptor, offsets[done:], sizes[done:], places[done:], target)) < len(offsets):
        _read_one(descriptor, int(offsets[done]), target[places[done] : places[done] + sizes[done]])
        done += 1  # it can be read after all: a signal had interrupted it, say


def warm_up() -> None:
    """Compile what `read_ranges` runs, before a clock is started."""
    none = np.zeros(0, np.int64)
    read_ranges(-1, none, none, none, np.zeros(1, np.uint8))


def _read_one(descriptor: int, offset: int, target: UInt8[np.ndarray, " bytes"]) -> None:
    """One range through the interpreter, which says why it fails."""
    got = os.preadv(descriptor, [memoryview(target)], offset)
    if got != target.nbytes:
        raise OSError(f"short read: {got} of {target.nbytes} bytes at offset {offset}")


@cache
def _compiled():
    from numba import njit, types

    pread = types.ExternalFunction("pread", types.int64(types.int32, types.intp, types.uint64, types.int64))

    @njit(nogil=True)
    def read(descriptor, offsets, sizes, places, target):
        start = target.ctypes.data
        for index in range(len(offsets)):
            if pread(descriptor, start + places[index], sizes[index], offsets[index]) != sizes[index]:
                return index
        return len(offsets)

    return read

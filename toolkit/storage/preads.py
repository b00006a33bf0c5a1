"""Many positioned reads in one compiled call without the interpreter's lock, which many threads would wait for."""

import os
from collections.abc import Callable

import numpy as np
from jaxtyping import Int64, UInt8


def read_ranges(
    descriptor: int,
    offsets: Int64[np.ndarray, " ranges"],
    sizes: Int64[np.ndarray, " ranges"],
    places: Int64[np.ndarray, " ranges"],
    target: UInt8[np.ndarray, " bytes"],
    taken: Int64[np.ndarray, " 1"] | None = None,
) -> None:
    """Read `sizes[i]` bytes at the file's `offsets[i]` to `target[places[i]:]`, one range after the other.

    Threads that call this with one and the same `taken`, which starts at zero, share the ranges: each takes the next
    that no other has, and returns when none is left. When a read fails, the others finish the range that they are at.
    For a direct descriptor, offsets, sizes, places and `target`'s address must be multiples of the file system's block.
    Raises `ValueError` for ranges that do not lie within `target`, and `OSError` when a read fails or falls short.
    """
    if not len(offsets) == len(sizes) == len(places):
        raise ValueError(
            f"{len(offsets)} offsets, {len(sizes)} sizes and {len(places)} places: expected as many of each"
        )
    if len(sizes) and (min(sizes.min(), places.min()) < 0 or (places + sizes).max() > target.nbytes):
        raise ValueError(f"a range does not lie within the target's {target.nbytes} bytes")
    # all calls have one memory layout, so that nothing is compiled again while a clock runs
    offsets, sizes, places = map(np.ascontiguousarray, (offsets, sizes, places))
    read, taken = _compiled(), np.zeros(1, np.int64) if taken is None else taken
    while (failed := read(descriptor, offsets, sizes, places, target, taken)) < len(offsets):
        try:  # a signal may have interrupted the read: try again
            read_one(descriptor, int(offsets[failed]), target[places[failed] : places[failed] + sizes[failed]])
        except OSError:
            taken[0] = len(offsets)  # the other threads take no more
            raise


def warm_up() -> None:
    """Compile the function that `read_ranges` calls, before a clock is started."""
    none = np.zeros(0, np.int64)
    read_ranges(-1, none, none, none, np.zeros(1, np.uint8))


def read_one(descriptor: int, offset: int, target: UInt8[np.ndarray, " bytes"]) -> None:
    """Fill `target` from `offset` by the interpreter's own read, whose errors tell the reason.

    Raises `OSError` if the read fails or falls short.
    """
    got = os.preadv(descriptor, [memoryview(target)], offset)
    if got != target.nbytes:
        raise OSError(f"short read: {got} of {target.nbytes} bytes at offset {offset}")


def _compiled() -> Callable:
    from toolkit.kernels.reads import read  # Numba takes a while to import

    return read

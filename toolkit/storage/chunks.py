"""Many positioned reads: arrays that say what is read from where to where, and a compiled loop that reads them.

The loop runs without the interpreter's lock, which many threads would wait for.
"""

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Protocol, Self

import numpy as np
from jaxtyping import Int64, UInt8

from toolkit.storage.direct import BLOCK_BYTES


class Blocks(Protocol):
    """Whole blocks of a shard, such as a `BlockRun`."""

    shard: str
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Chunks:
    """Reads of one shard: `sizes[i]` bytes from `offsets[i]`, to `places[i]` of the target."""

    shard: str
    offsets: Int64[np.ndarray, " chunks"]
    sizes: Int64[np.ndarray, " chunks"]
    places: Int64[np.ndarray, " chunks"]

    def cut(self, chunk_bytes: int) -> Self:
        """The same bytes in chunks of at most so many bytes."""
        if len(self.sizes) and self.sizes.min() > 0 and self.sizes.max() <= chunk_bytes:
            return self  # as they are, which a burst of short reads need not wait for
        counts = -(-self.sizes // chunk_bytes)
        owner = np.repeat(np.arange(len(counts)), counts)
        within = (np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)) * chunk_bytes
        sizes = np.minimum(self.sizes[owner] - within, chunk_bytes)
        return replace(self, offsets=self.offsets[owner] + within, sizes=sizes, places=self.places[owner] + within)

    def at(self, index: Int64[np.ndarray, " some"] | slice) -> Self:
        """Some of them."""
        return replace(self, offsets=self.offsets[index], sizes=self.sizes[index], places=self.places[index])

    def joined(self) -> Self:
        """The same bytes, where chunks that follow each other both in the file and in the target are one."""
        ends = [place + self.sizes for place in (self.offsets, self.places)]
        breaks = (self.offsets[1:] != ends[0][:-1]) | (self.places[1:] != ends[1][:-1])
        firsts = np.flatnonzero(np.concatenate([[True], breaks]))[: len(self.sizes)]
        sizes = np.add.reduceat(self.sizes, firsts) if len(firsts) else self.sizes
        return replace(self, offsets=self.offsets[firsts], sizes=sizes, places=self.places[firsts])


def in_line(parts: Iterable[Blocks]) -> list[Chunks]:
    """The reads that put blocks one behind the other into a target, shard by shard."""
    found, place = [], 0
    for shard, group in groupby(parts, key=lambda part: part.shard):
        offsets, sizes = np.array([(part.offset, part.nbytes) for part in group], np.int64).T
        found.append(Chunks(shard, offsets, sizes, place + np.cumsum(sizes) - sizes).joined())
        place += int(sizes.sum())
    return found


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

    Raises `OSError` if the read fails or falls short, unless it ends with the file.
    """
    got = os.preadv(descriptor, [memoryview(target)], offset)
    if got != target.nbytes and not is_end(descriptor, offset + got, offset + target.nbytes):
        raise OSError(f"short read: {got} of {target.nbytes} bytes at offset {offset}")


def is_end(descriptor: int, got: int, wanted: int) -> bool:
    """Whether a read that came to byte `got` of a file has all that there is of the block before byte `wanted`.

    Only files that others wrote end within a block.
    """
    return wanted - BLOCK_BYTES < got == os.fstat(descriptor).st_size


def _compiled() -> Callable:
    from toolkit.kernels.reads import read  # Numba takes a while to import

    return read

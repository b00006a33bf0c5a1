"""Scalar maths of sparse outliers: a column and an fp16 value in one word. For CPUs and GPUs from the same source.

Words and offsets come from files: no contents make a kernel touch memory outside of the tensors.
"""

from functools import cache

import numba

from toolkit.kernels.engine.elements import float32_from_float16

BLOCK = 16  # rows that PTCSR stores together: those of one tile of SpQR
NARROW_COLUMNS = 1 << 16  # as many columns can be told by the 16 bits of a 32-bit word
NARROW_BITS, WIDE_BITS = 16, 32  # of the column, in words of 32 and 64 bits


@numba.njit(inline="always")
def column(word, bits):
    """The word's low bits."""
    return numba.int64(numba.uint64(word) & ((numba.uint64(1) << numba.uint64(bits)) - numba.uint64(1)))


@numba.njit(error_model="numpy")
def value(word, bits):
    """The fp16 number above the column, as fp32."""
    return float32_from_float16(numba.uint16(numba.uint64(word) >> numba.uint64(bits)))


@numba.njit(inline="always")
def within(first, end, count):
    """A stretch of words, cut to the `count` that there are."""
    first = max(numba.int64(first), numba.int64(0))
    return first, max(first, min(numba.int64(end), numba.int64(count)))


@cache
def span(storage: str):
    """The function that gives the words of a row of a block: the first, the end, and the stride.

    They are cut to the `count` words that there are.
    """
    along = storage == "csr"

    @numba.njit(inline="always")
    def span(offsets, block, row, count):
        if along:
            first, end = within(offsets[BLOCK * block + row], offsets[BLOCK * block + row + 1], count)
        else:
            first, end = within(offsets[block] + row, offsets[block + 1], count)
        return first, end, 1 if along else BLOCK

    return span

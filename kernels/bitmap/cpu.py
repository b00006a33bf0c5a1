"""The bitmap kernels for any CPU: plain loops over words and bits.

All arrays hold bits: floating-point elements travel as unsigned integers of their width, so one compiled function
serves fp16 and bf16 alike. Each function works on rows `first` to `last` and releases the GIL.

Packed matrices come from files, so the kernels stay within `values` for any offsets and bits: `first_value` bounds the
start of a row, and nothing is read behind the last value. Contents that contradict each other give wrong numbers
(`Bitmap.check` finds them), never a read outside.
"""

from functools import cache

import numba
import torch

from toolkit.kernels.bitmap.shared import BLOCK, WORD, lowest_bit, popcount
from toolkit.kernels.engine.compiled import compiled
from toolkit.kernels.engine.elements import TO_FLOAT32


@compiled
def mark(dense, significant, bitmap, counts, blocks, first, last):
    """Set a bit for every element with a `significant` bit (all but the sign, for floats), and count them.

    `counts` gets the number in each row, `blocks` the number in the row before each of its blocks.
    """
    columns = dense.shape[1]
    for row in range(first, last):
        count = 0
        for at in range(bitmap.shape[1]):
            if WORD * at % BLOCK == 0:
                blocks[row, WORD * at // BLOCK] = count
            word = numba.uint32(0)
            for bit in range(min(WORD, columns - WORD * at)):
                word |= numba.uint32((dense[row, WORD * at + bit] & significant) != 0) << numba.uint32(bit)
            bitmap[row, at] = word
            count += popcount(word)
        counts[row] = count


@compiled
def gather(dense, bitmap, offsets, values, first, last):
    """Copy the marked elements to `values`, in row-major order."""
    for row in range(first, last):
        at = offsets[row]
        for index in range(bitmap.shape[1]):
            word = bitmap[row, index]
            while word != 0:
                values[at] = dense[row, WORD * index + lowest_bit(word)]
                at += 1
                word &= word - numba.uint32(1)


@numba.njit(inline="always")
def first_value(offsets, row, values):
    """The place of the row's first value, brought within the values."""
    return min(max(offsets[row], 0), values.size)


@compiled
def positions(bitmap, offsets, columns, first, last):
    """The column of every marked element, in row-major order."""
    for row in range(first, last):
        at = first_value(offsets, row, columns)
        for index in range(bitmap.shape[1]):
            word = bitmap[row, index]
            while word != 0 and at < columns.size:
                columns[at] = WORD * index + lowest_bit(word)
                at += 1
                word &= word - numba.uint32(1)


@numba.njit(inline="always")
def scatter(word, values, at, dense, row, column):
    """Write the columns of one word; the last of a row may hold fewer than a word's. Returns the next value's place."""
    for bit in range(min(WORD, dense.shape[1] - column)):
        if at >= values.size:  # nothing is left to read: zeros to the end
            dense[row, column + bit] = 0
            continue
        present = (word >> numba.uint32(bit)) & numba.uint32(1)
        # a product instead of a branch, which would be mispredicted half of the time
        dense[row, column + bit] = values[at] * values.dtype.type(present)
        at += numba.int64(present)
    return at


@compiled
def decompress(bitmap, offsets, values, dense, first, last):
    """Fill rows of `dense` from the packed form."""
    for row in range(first, last):
        at = first_value(offsets, row, values)
        for index in range(bitmap.shape[1]):
            at = scatter(bitmap[row, index], values, at, dense, row, WORD * index)


@numba.njit(inline="always")
def dot(word, values, at, x, column, to_float32):
    """The part of a row's product that one word holds, its values from `at` on; 0 if there are not so many values.

    Bits beyond the last column are left out.
    """
    total = numba.float32(0)
    if at + popcount(word) > values.size:
        return total
    if column + WORD > x.size:
        word &= numba.uint32((1 << (x.size - column)) - 1)
    while word != 0:
        total += to_float32(values[at]) * x[column + lowest_bit(word)]
        at += 1
        word &= word - numba.uint32(1)
    return total


@cache
def matvec(dtype: torch.dtype):
    """The function that sets `y[row] = Σ w[row, column] · x[column]` for this element type, summed in fp32."""
    to_float32 = TO_FLOAT32[dtype]

    @compiled
    def matvec(bitmap, offsets, values, x, y, first, last):
        for row in range(first, last):
            total = numba.float32(0)
            at = first_value(offsets, row, values)
            for index in range(bitmap.shape[1]):
                total += dot(bitmap[row, index], values, at, x, WORD * index, to_float32)
                at += popcount(bitmap[row, index])
            y[row] = total

    return matvec

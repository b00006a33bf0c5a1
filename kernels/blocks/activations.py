"""Vectors rounded to 8 bits for products with blocks, as llama.cpp rounds them: `quantize_row_q8_K`, `_q8_0`, `_q8_1`.

A code is the nearest integer to 127 · x / largest, where `largest` is the largest magnitude of a block. Products are
the same as with ggml's own blocks; what lies beside the codes is what the kernels here read.
"""

import numba
import numpy as np

from toolkit.kernels.engine.compiled import compiled
from toolkit.kernels.engine.elements import as_bits, as_float32, float16_bits, float32_from_float16

WIDE, NARROW = 256, 32  # columns of a block
PART = 16  # columns of a wide block that share a sum
STEPS = numba.float32(127)
INFINITE = 0x7F800000  # the bits of infinity; those of NaN are above
# added to a number below 2^22, it leaves the nearest integer in the lowest bits
TO_INTEGER = numba.float32(3 << 22)


@numba.njit(inline="always")
def _largest(x, vector, start, count):
    """The largest magnitude, or NaN if a number is not finite."""
    found = numba.uint32(0)
    for i in range(start, start + count):
        found = max(found, numba.uint32(as_bits(x[vector, i]) & numba.uint32(0x7FFFFFFF)))
    return as_float32(found) if found < numba.uint32(INFINITE) else numba.float32(np.nan)


@numba.njit(inline="always")
def _round(x, vector, start, count, largest, codes):
    """Fill the codes of a block, and return what x was multiplied with."""
    factor = STEPS / largest if largest > 0 else numba.float32(0)
    for i in range(start, start + count):
        bits = as_bits(x[vector, i] * factor + TO_INTEGER)
        codes[vector, i] = numba.int8(numba.int32(bits & numba.uint32(0x7FFFFF)) - numba.int32(0x400000))
    return factor


@numba.njit(inline="always")
def _sum(codes, vector, start, count):
    found = numba.int32(0)
    for i in range(start, start + count):
        found += codes[vector, i]
    return found


@compiled
def prepare_wide(x, codes, scales, sums):
    """Round x, fp32 [vectors, columns], in blocks of 256: codes, a scale for each, and the sums of 16 codes each."""
    for vector in range(len(x)):
        for block in range(scales.shape[1]):
            start = WIDE * block
            largest = _largest(x, vector, start, WIDE)
            factor = _round(x, vector, start, WIDE, largest, codes)
            scales[vector, block] = numba.float32(1) / factor if largest > 0 else largest
            for part in range(WIDE // PART):
                sums[vector, WIDE // PART * block + part] = _sum(codes, vector, start + PART * part, PART)


@compiled
def prepare_narrow(x, offset, codes, scales, starts):
    """Round x in blocks of 32: codes, scales, and `starts`: less so many times the sum of each four codes.

    What lies behind the last column must be zero in all three.
    """
    for vector in range(len(x)):
        for block in range(x.shape[1] // NARROW):
            start = NARROW * block
            largest = _largest(x, vector, start, NARROW)
            _round(x, vector, start, NARROW, largest, codes)
            scales[vector, block] = float32_from_float16(float16_bits(largest / STEPS))
            for four in range(start, start + NARROW, 4):
                starts[vector, four // 4] = -offset * _sum(codes, vector, four, 4)


@compiled
def prepare_with_sums(x, codes, scales, sums):
    """The same with the sum of each block's rounded numbers, which is rounded to fp16 itself."""
    for vector in range(len(x)):
        for block in range(x.shape[1] // NARROW):
            start = NARROW * block
            largest = _largest(x, vector, start, NARROW)
            _round(x, vector, start, NARROW, largest, codes)
            scale = largest / STEPS
            scales[vector, block] = float32_from_float16(float16_bits(scale))
            total = scale * numba.float32(_sum(codes, vector, start, NARROW))
            sums[vector, block] = float32_from_float16(float16_bits(total))

"""Scalar maths of SpQR's dense part: where the codes lie in a word, and what they stand for.

Compiled for CPUs and GPUs from the same source.
"""

import numba

from toolkit.kernels.engine.elements import as_bits, as_float32

TILE = 16  # rows and columns of a tile; a word holds one row of it (the thesis' beta1 = beta2 = 16)
LEVELS = 8  # values of a 3-bit code
# where a word's fields begin, in bits
ZERO, WEIGHTS, SECOND_ORDER, SPARE = 3, 6, 54, 62


@numba.njit(inline="always")
def code(word, start):
    """The 3-bit code that begins at this bit."""
    return numba.int64((word >> numba.uint64(start)) & numba.uint64(7))


@numba.njit(error_model="numpy")
def dequantise(code, scale, zero):
    """scale · (code − zero), as fp16 computes it: every step is rounded to fp16. All numbers are held as fp32.

    A row's scale, its zero point and its weights all follow this rule (thesis, chapter 2).
    """
    return round_to_float16(scale * round_to_float16(numba.float32(code) - zero))


@numba.njit(error_model="numpy")
def round_to_float16(value):
    """The nearest fp16 number, ties to even, as fp32. Adding and subtracting a power of two rounds the last bits."""
    bits = as_bits(value)
    sign, magnitude = bits & numba.uint32(0x80000000), as_float32(bits & numba.uint32(0x7FFFFFFF))
    if magnitude >= numba.float32(65520):
        return as_float32(sign | numba.uint32(0x7F800000))
    # subnormals of fp16 are as far apart as its least normal numbers
    exponent = max(bits & numba.uint32(0x7F800000), numba.uint32(113 << 23))
    power = as_float32(numba.uint32(exponent + numba.uint32(13 << 23)))
    return as_float32(sign | as_bits((magnitude + power) - power)) if value == value else value

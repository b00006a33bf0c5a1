"""The Huffman kernels for CPUs: four rows are decoded at once.

A look-up waits for the length that the one before it found, some eight cycles, and yields up to seven symbols. Four
rows are four such chains, which the processor runs beside each other. A read of 8 bytes serves five look-ups.

Files may hold anything: places are kept within the codes, and symbols within the row and the room behind it.
"""

from functools import cache

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from toolkit.kernels.engine import simd
from toolkit.kernels.engine.compiled import compiled
from toolkit.kernels.engine.elements import ByType
from toolkit.kernels.engine.products import ROWS, multiply_rows
from toolkit.kernels.engine.products import portable as portable_product
from toolkit.kernels.huffman.code import AT_ONCE, BITS, COUNT, fill_codes
from toolkit.kernels.huffman.shared import EMPTY, LONGEST, SYMBOLS

LOOK_UPS = (64 - 7) // LONGEST  # that 8 bytes serve, wherever in their first byte they begin
ROOM = 64  # bytes behind a row of symbols, for those that come with the last ones of it
BYTE = 8  # bits
assert ROOM >= LOOK_UPS * AT_ONCE + 1


@intrinsic
def word(typing_context, array, at):
    """The 8 bytes from `at` on, at any alignment."""

    def generate(context, builder, signature, arguments):
        return builder.load(simd.pointer(context, builder, array, *arguments, ir.IntType(64)), align=1)

    return types.uint64(array, types.int64), generate


@intrinsic
def put_word(typing_context, array, at, value):
    """Write 8 bytes from `at` on, at any alignment."""

    def generate(context, builder, signature, arguments):
        builder.store(arguments[2], simd.pointer(context, builder, array, *arguments[:2], ir.IntType(64)), align=1)

    return types.void(array, types.int64, types.uint64), generate


@numba.njit(inline="always")
def first_bit(offsets, row, coded):
    """Where the codes of a row begin, at a whole byte, brought within the codes."""
    return (min(max(offsets[row], 0), BYTE * coded.size) + BYTE - 1) // BYTE * BYTE


@numba.njit(inline="always")
def step(coded, table, symbols, bit, place, end):
    """Five look-ups of one row: the bit and the place in `symbols` to go on with."""
    ahead = word(coded, min(bit >> 3, coded.size - EMPTY)) >> numba.uint64(bit & 7)
    for _ in range(LOOK_UPS):
        entry = simd.item(table, numba.int64(ahead & numba.uint64((1 << LONGEST) - 1)))
        put_word(symbols, place, entry)
        used = entry >> numba.uint64(BITS)
        ahead >>= used
        bit += numba.int64(used)
        place += numba.int64(entry >> numba.uint64(COUNT) & numba.uint64(15))
    return bit, min(place, end)


@compiled
def decode_rows(coded, offsets, table, symbols, row, last):
    """Decode `row` and the three behind it into the rows of `symbols` [4, columns + ROOM]; `last` - 1 in place of more.

    Rows are filled whatever the codes are.
    """
    stride, columns, most = symbols.shape[1], symbols.shape[1] - ROOM, last - 1
    a, b, c, d = 0, stride, 2 * stride, 3 * stride
    end_a, end_b, end_c, end_d = a + columns, b + columns, c + columns, d + columns
    bit_a, bit_b = first_bit(offsets, row, coded), first_bit(offsets, min(row + 1, most), coded)
    bit_c, bit_d = first_bit(offsets, min(row + 2, most), coded), first_bit(offsets, min(row + 3, most), coded)
    while a < end_a or b < end_b or c < end_c or d < end_d:
        bit_a, a = step(coded, table, symbols, bit_a, a, end_a)
        bit_b, b = step(coded, table, symbols, bit_b, b, end_b)
        bit_c, c = step(coded, table, symbols, bit_c, c, end_c)
        bit_d, d = step(coded, table, symbols, bit_d, d, end_d)


@numba.njit(inline="always")
def split_8(bits, symbols, rest):
    """The symbol is the integer."""
    symbols[:] = bits


@numba.njit(inline="always")
def split_16(bits, symbols, rest):
    """Bits 7 to 14 are the symbol: bf16's exponent, fp16's with three bits of the mantissa. Sign and others are raw."""
    for i in range(bits.size):
        symbols[i] = bits[i] >> 7
        rest[i] = bits[i] >> 8 & 0x80 | bits[i] & 0x7F


@numba.njit(inline="always")
def split_32(bits, symbols, rest):
    """Bits 23 to 30 are the symbol, the exponent; the rest are three planes of bytes, sign and upper mantissa last."""
    for i in range(bits.size):
        symbols[i] = bits[i] >> 23
        rest[i] = bits[i]
        rest[bits.size + i] = bits[i] >> 8
        rest[2 * bits.size + i] = bits[i] >> 24 & 0x80 | bits[i] >> 16 & 0x7F


@numba.njit(inline="always")
def join_8(symbols, rest, bits):
    """The inverse of `split_8`."""
    for i in range(bits.size):
        bits[i] = symbols[i]


@numba.njit(inline="always")
def join_16(symbols, rest, bits):
    """The inverse of `split_16`."""
    for i in range(bits.size):
        low = numba.uint16(rest[i])
        bits[i] = low << 8 & 0x8000 | numba.uint16(symbols[i]) << 7 | low & 0x7F


@numba.njit(inline="always")
def join_32(symbols, rest, bits):
    """The inverse of `split_32`."""
    for i in range(bits.size):
        low, middle = numba.uint32(rest[i]), numba.uint32(rest[bits.size + i])
        high = numba.uint32(rest[2 * bits.size + i])
        bits[i] = high << 24 & 0x80000000 | numba.uint32(symbols[i]) << 23 | (high & 0x7F) << 16 | middle << 8 | low


# the bits of an element
UNSIGNED = ByType(float32=numba.uint32, float16=numba.uint16, bfloat16=numba.uint16, int8=numba.uint8)
SPLIT = ByType(float32=split_32, float16=split_16, bfloat16=split_16, int8=split_8)
JOIN = ByType(float32=join_32, float16=join_16, bfloat16=join_16, int8=join_8)


@cache
def split(dtype: object):
    """The function that parts rows of a matrix's bits into symbols [rows, columns] and the rest, as bytes."""
    of_row = SPLIT[dtype]

    @compiled
    def split(bits, symbols, rest, first, last):
        for row in range(first, last):
            of_row(bits[row], symbols[row], rest[row])

    return split


@compiled
def count_bits(symbols, lengths, bits, first, last):
    """Set how many bits the codes of each row take."""
    for row in range(first, last):
        total = 0
        for column in range(symbols.shape[1]):
            total += lengths[symbols[row, column]]
        bits[row] = total


@compiled
def write_codes(symbols, lengths, offsets, coded, first, last):
    """Write the codes of each row, from the byte at which it begins."""
    codes = np.zeros(SYMBOLS, np.uint16)
    fill_codes(lengths, codes)
    for row in range(first, last):
        at, ahead, held = first_bit(offsets, row, coded) // BYTE, numba.uint64(0), 0
        for column in range(symbols.shape[1]):
            symbol = symbols[row, column]
            ahead |= numba.uint64(codes[symbol]) << numba.uint64(held)
            held += lengths[symbol]
            while held >= BYTE:
                coded[at] = ahead & numba.uint64(0xFF)
                ahead, held, at = ahead >> numba.uint64(BYTE), held - BYTE, at + 1
        if held:
            coded[at] = ahead & numba.uint64(0xFF)


@compiled
def decoded_bits(coded, offsets, table, lengths, columns, bits, first, last):
    """Set how many bits the first `columns` symbols of each row take, whatever comes behind them."""
    symbols = np.empty((ROWS, columns + ROOM), np.uint8)
    for row in range(first, last, ROWS):
        decode_rows(coded, offsets, table, symbols, row, last)
        rows = min(ROWS, last - row)
        count_bits(symbols[:, :columns], lengths, bits[row:], 0, rows)


@numba.njit(inline="always")
def join_rows(join, symbols, rest, dense, row, target, rows):
    """Put so many rows, whose symbols are decoded, together in `dense` from `target` on."""
    columns = dense.shape[1]
    for each in range(rows):
        join(symbols[each, :columns], rest[row + each], dense[target + each])


@cache
def decode(dtype: object):
    """The function that fills rows of `dense`, the matrix's bits."""
    join = JOIN[dtype]

    @compiled
    def decode(coded, offsets, table, rest, dense, first, last):
        symbols = np.empty((ROWS, dense.shape[1] + ROOM), np.uint8)
        for row in range(first, last, ROWS):
            decode_rows(coded, offsets, table, symbols, row, last)
            join_rows(join, symbols, rest, dense, row, row, min(ROWS, last - row))

    return decode


def _multiplying(multiply, kind, dtype: object):
    """The function that decodes four rows, which the caches hold, and multiplies them with each vector of `x`.

    `multiply` is given these rows, how many they are, x, y and the place in y of the first one.
    """
    join = JOIN[dtype]

    @compiled
    def matvec(coded, offsets, table, rest, x, y, first, last):
        symbols, dense = np.empty((ROWS, x.shape[1] + ROOM), np.uint8), np.empty((ROWS, x.shape[1]), kind)
        for row in range(first, last, ROWS):
            decode_rows(coded, offsets, table, symbols, row, last)
            rows = min(ROWS, last - row)
            join_rows(join, symbols, rest, dense, row, 0, rows)
            multiply(dense, rows, x, y, row)

    return matvec


@cache
def matvec(dtype: object):
    """The function that sets `y[vector, row] = Σ w[row, column] · x[vector, column]`, with SIMD."""
    product = multiply_rows(dtype)

    @numba.njit(inline="always")
    def multiply(dense, rows, x, y, row):
        if rows == ROWS:
            product(dense, 0, x.shape[1], ROWS, x, y, row)
            return
        for each in range(rows):
            product(dense, each * x.shape[1], x.shape[1], 1, x, y, row + each)

    return _multiplying(multiply, UNSIGNED[dtype], dtype)


@cache
def portable_matvec(dtype: object):
    """The same for any CPU."""
    product = portable_product(dtype)

    @numba.njit(inline="always")
    def multiply(dense, rows, x, y, row):
        product(dense, x, y[:, row:], 0, rows)

    return _multiplying(multiply, UNSIGNED[dtype], dtype)

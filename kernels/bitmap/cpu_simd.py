"""The bitmap kernels for CPUs with SIMD: a word, 32 columns, at a step.

Every kernel here is built on one step, `expand(values, at, word)`: it reads the next values and puts each in the lane
of its set bit, with zeros between. It may read, but never uses, up to `values[at + 31]`. There is one for each kind of
CPU; `decompress` and `matvec` are given it.

Words with at least 32 values left take the fast path, so nothing is read beyond the values and they need no padding.
The rest of a row, or of the values, is processed bit by bit.
"""

from functools import cache

import numba
import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from toolkit.kernels.bitmap.cpu import dot, first_value, scatter
from toolkit.kernels.bitmap.shared import WORD, popcount
from toolkit.kernels.engine import simd
from toolkit.kernels.engine.compiled import compiled
from toolkit.kernels.engine.elements import TO_FLOAT32
from toolkit.kernels.engine.products import ROWS, multiply_rows
from toolkit.kernels.engine.simd import (
    I8,
    I32,
    I64,
    LANES_TO_FLOAT32,
    PREFETCH_BYTES,
    Vector,
    fence,
    fma,
    item,
    load,
    prefetch,
    store,
    stream,
    total,
    zeros,
)

REGISTER = 16  # bytes that one byte shuffle moves
ABSENT = 0x80  # a shuffle index that gives a zero


@intrinsic
def by_shuffle(typing_context, values, at, word):
    """With SSSE3's byte shuffle: a table holds, for every pattern of 4 or 8 bits, the place of each byte."""
    width = values.dtype.bitwidth // 8
    lanes = min(REGISTER // width, 8)

    def generate(context, builder, signature, arguments):
        array, at_value, word_value = arguments
        some, full = (ir.VectorType(I8, size) for size in (lanes * width, REGISTER))
        table = simd.constant_table(builder, f"shuffles_{width}", shuffles(lanes, width))

        def expanded(start: int):
            place = _place(builder, at_value, word_value, start)
            data = builder.load(simd.pointer(context, builder, values, array, place, some), align=1)
            if some != full:
                data = simd.join(builder, [data, ir.Constant(some, None)])
            pattern = builder.and_(builder.lshr(word_value, I32(start)), I32((1 << lanes) - 1))
            order = builder.load(builder.gep(table, [builder.zext(pattern, I64)]), align=REGISTER)
            moved = simd.call(builder, "x86.ssse3.pshuf.b.128", full, data, order)
            return builder.bitcast(simd.take(builder, moved, range(some.count)), part)

        part = context.get_value_type(Vector(values.dtype, lanes))
        return simd.join(builder, [expanded(start) for start in range(0, WORD, lanes)])

    return Vector(values.dtype, WORD)(values, types.int64, types.uint32), generate


def shuffles(lanes: int, width: int) -> list[list[int]]:
    """For every pattern of `lanes` bits, the source of each byte: elements of `width` bytes, the lowest bit first."""
    return [_shuffle(pattern, lanes, width) for pattern in range(1 << lanes)]


def _shuffle(pattern: int, lanes: int, width: int) -> list[int]:
    order, taken = [], 0
    for lane in range(lanes):
        present = pattern >> lane & 1
        order += [taken * width + byte if present else ABSENT for byte in range(width)]
        taken += present
    return order + [ABSENT] * (REGISTER - len(order))


@intrinsic
def by_instruction(typing_context, values, at, word):
    """With AVX-512's expand instruction, in its register form: the one that reads memory is slow on AMD."""
    lanes = min(WORD, simd.CACHE_LINE * 8 // values.dtype.bitwidth)
    part = Vector(values.dtype, lanes)

    def generate(context, builder, signature, arguments):
        array, at_value, word_value = arguments
        bits = builder.bitcast(word_value, ir.VectorType(ir.IntType(1), WORD))
        kind = context.get_value_type(part)
        nothing, name = ir.Constant(kind, None), f"x86.avx512.mask.expand.v{lanes}i{values.dtype.bitwidth}"

        def expanded(start: int):
            mask = bits if lanes == WORD else simd.take(builder, bits, range(start, start + lanes))
            place = _place(builder, at_value, word_value, start)
            data = builder.load(simd.pointer(context, builder, values, array, place, kind), align=1)
            return simd.call(builder, name, kind, simd.in_register(builder, data), nothing, mask)

        return simd.join(builder, [expanded(start) for start in range(0, WORD, lanes)])

    return Vector(values.dtype, WORD)(values, types.int64, types.uint32), generate


def _place(builder, at, word, start: int) -> ir.Value:
    """Where the values of the word's bits from `start` on begin."""
    before = builder.ctpop(builder.and_(word, I32((1 << start) - 1)))
    return builder.add(at, builder.zext(before, I64))


@numba.njit(inline="always")
def safe_words(at, size, index, full):
    """How many words from `index` on can be expanded without reading beyond the values, whatever their bits."""
    return min(full - index, (size - at) // WORD)


@cache
def decode_row(expand, streaming: bool):
    """The function that decodes `row` into `dense[target]`."""
    put = stream if streaming else store

    @numba.njit(inline="always")
    def decode_row(bitmap, offsets, values, row, dense, target):
        columns, ahead = dense.shape[1], PREFETCH_BYTES // values.itemsize
        at = first_value(offsets, row, values)
        index = 0
        while safe_words(at, values.size, index, columns // WORD) > 0:
            for _ in range(safe_words(at, values.size, index, columns // WORD)):
                word = item(bitmap, row * bitmap.shape[1] + index)
                prefetch(values, at + ahead)
                put(dense, target * columns + WORD * index, expand(values, at, word))
                at += popcount(word)
                index += 1
        for rest in range(index, bitmap.shape[1]):
            at = scatter(bitmap[row, rest], values, at, dense, target, WORD * rest)

    return decode_row


@cache
def decompress(expand, streaming: bool):
    """The function that fills rows of `dense`; `streaming` past the caches, for rows that start on a cache line."""
    decode = decode_row(expand, streaming)

    @compiled
    def decompress(bitmap, offsets, values, dense, first, last):
        for row in range(first, last):
            decode(bitmap, offsets, values, row, dense, row)
        if streaming:
            fence()

    return decompress


@cache
def decode_and_multiply(expand, dtype: torch.dtype):
    """The function that decodes a few rows, which the caches hold, and sets `y[vector, row]` for each vector of `x`."""
    decode, multiply = decode_row(expand, False), multiply_rows(dtype)

    @compiled
    def decode_and_multiply(bitmap, offsets, values, x, y, first, last):
        dense = np.empty((ROWS, x.shape[1]), values.dtype)
        for row in range(first, last, ROWS):
            rows = min(ROWS, last - row)
            for target in range(rows):
                decode(bitmap, offsets, values, row + target, dense, target)
            if rows == ROWS:
                multiply(dense, 0, x.shape[1], ROWS, x, y, row)
                continue
            for target in range(rows):
                multiply(dense, target * x.shape[1], x.shape[1], 1, x, y, row + target)

    return decode_and_multiply


@cache
def matvec(expand, dtype: torch.dtype):
    """The function that sets `y[row] = Σ w[row, column] · x[column]` for this element type, summed in fp32 lanes."""
    lanes_to_float32, to_float32 = LANES_TO_FLOAT32[dtype], TO_FLOAT32[dtype]

    @compiled
    def matvec(bitmap, offsets, values, x, y, first, last):
        ahead = PREFETCH_BYTES // values.itemsize
        for row in range(first, last):
            sums = zeros(WORD)
            at = first_value(offsets, row, values)
            index = 0
            while safe_words(at, values.size, index, x.size // WORD) > 0:
                for _ in range(safe_words(at, values.size, index, x.size // WORD)):
                    word = item(bitmap, row * bitmap.shape[1] + index)
                    prefetch(values, at + ahead)
                    weights = lanes_to_float32(expand(values, at, word))
                    sums = fma(weights, load(x, WORD * index, WORD), sums)
                    at += popcount(word)
                    index += 1
            result = total(sums)
            for rest in range(index, bitmap.shape[1]):
                result += dot(bitmap[row, rest], values, at, x, WORD * rest, to_float32)
                at += popcount(bitmap[row, rest])
            y[row] = result

    return matvec

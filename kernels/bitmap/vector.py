"""The bitmap kernels for CPUs with SIMD: a word, 32 columns, at a step, given a way to expand it.

Full words with 32 values left go the fast way, so that nothing is read beyond the values and they need no padding; what
remains of a row, or of the values, goes bit by bit.
"""

from functools import cache

import numba
import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from toolkit.kernels.bitmap.cpu import COMPILE, TO_FLOAT32, dot, scatter
from toolkit.kernels.bitmap.shared import WORD, popcount
from toolkit.kernels.common.simd import Vector, fence, fma, item, load, prefetch, store, stream, total, zeros

# the values are read in bursts that the hardware's own prefetching does not keep up with
PREFETCH_BYTES = 4096


@intrinsic
def bfloat16_lanes(typing_context, vector):
    """bf16 bits to fp32."""

    def generate(context, builder, signature, arguments):
        wide = builder.zext(arguments[0], ir.VectorType(ir.IntType(32), vector.lanes))
        return builder.bitcast(builder.shl(wide, ir.Constant(wide.type, [16] * vector.lanes)), _floats(vector.lanes))

    return Vector(types.float32, vector.lanes)(vector), generate


@intrinsic
def float16_lanes(typing_context, vector):
    """fp16 bits to fp32."""

    def generate(context, builder, signature, arguments):
        halves = builder.bitcast(arguments[0], ir.VectorType(ir.HalfType(), vector.lanes))
        return builder.fpext(halves, _floats(vector.lanes))

    return Vector(types.float32, vector.lanes)(vector), generate


@intrinsic
def float32_lanes(typing_context, vector):
    """fp32 bits to fp32."""

    def generate(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], _floats(vector.lanes))

    return Vector(types.float32, vector.lanes)(vector), generate


@intrinsic
def int8_lanes(typing_context, vector):
    """Signed bytes to fp32."""

    def generate(context, builder, signature, arguments):
        wide = builder.sext(arguments[0], ir.VectorType(ir.IntType(32), vector.lanes))
        return builder.sitofp(wide, _floats(vector.lanes))

    return Vector(types.float32, vector.lanes)(vector), generate


LANES_TO_FLOAT32 = {
    torch.float32: float32_lanes,
    torch.float16: float16_lanes,
    torch.bfloat16: bfloat16_lanes,
    torch.int8: int8_lanes,
}


@numba.njit(inline="always")
def safe_words(at, size, index, full):
    """How many words from `index` on can be expanded without reading beyond the values, whatever their bits."""
    return min(full - index, (size - at) // WORD)


@cache
def decompress(expand, streaming: bool):
    """The function that fills rows of `dense`; `streaming` past the caches, for rows that start on a cache line."""
    put = stream if streaming else store

    @numba.njit(**COMPILE)
    def decompress(bitmap, offsets, values, dense, first, last):
        columns = dense.shape[1]
        ahead = PREFETCH_BYTES // values.itemsize
        for row in range(first, last):
            at = offsets[row]
            index = 0
            while safe_words(at, values.size, index, columns // WORD) > 0:
                for _ in range(safe_words(at, values.size, index, columns // WORD)):
                    word = item(bitmap, row * bitmap.shape[1] + index)
                    prefetch(values, at + ahead)
                    put(dense, row * columns + WORD * index, expand(values, at, word))
                    at += popcount(word)
                    index += 1
            for rest in range(index, bitmap.shape[1]):
                at = scatter(bitmap[row, rest], values, at, dense, row, WORD * rest)
        if streaming:
            fence()

    return decompress


@cache
def matvec(expand, dtype: torch.dtype):
    """The function that sets `y[row] = Σ w[row, column] · x[column]` for this element type, summed in fp32 lanes."""
    lanes_to_float32, to_float32 = LANES_TO_FLOAT32[dtype], TO_FLOAT32[dtype]

    @numba.njit(**COMPILE)
    def matvec(bitmap, offsets, values, x, y, first, last):
        ahead = PREFETCH_BYTES // values.itemsize
        for row in range(first, last):
            sums = zeros(WORD)
            at = offsets[row]
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


def _floats(lanes: int) -> ir.VectorType:
    return ir.VectorType(ir.FloatType(), lanes)

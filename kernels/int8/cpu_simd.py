"""The int8 product for CPUs with SIMD.

Weights are sign-extended, converted to fp32 and multiplied: three instructions a register. Four rows at once share what
they read of `x` and make four streams of reads, which memory serves faster than one; several vectors share the
converted weights instead. Both sum the same columns in the same lanes, so that their results are the same to the bit.
"""

from functools import cache

import numba
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from toolkit.kernels.common import simd
from toolkit.kernels.common.simd import CACHE_LINE, Vector, int8_lanes, prefetch, total, zeros
from toolkit.kernels.common.threads import COMPILE

LANES = 16
ROWS = 4  # multiplied at once with one vector
VECTORS = 4  # multiplied at once with one row
PREFETCH_BYTES = 1024


@intrinsic(prefer_literal=True)
def load_rows(typing_context, array, at, stride, rows):
    """`LANES` elements from `at`, from `at + stride` and so on, one after another in one vector."""
    vector = Vector(array.dtype, rows.literal_value * LANES)

    def generate(context, builder, signature, arguments):
        data, place, stride = arguments[:3]
        kind, parts = context.get_value_type(Vector(array.dtype, LANES)), []
        for _ in range(rows.literal_value):
            source = simd.pointer(context, builder, array, data, place, kind)
            parts.append(builder.load(source, align=array.dtype.bitwidth // 8))
            place = builder.add(place, stride)
        return simd.join(builder, parts)

    return vector(array, types.int64, types.int64, rows), generate


@intrinsic(prefer_literal=True)
def add_products(typing_context, sums, weights, x):
    """`sums` and, for each row of `weights` and each vector of `x`, their product in each of `LANES` lanes."""
    rows, vectors = weights.lanes // LANES, x.lanes // LANES
    kind = ir.VectorType(ir.FloatType(), LANES)

    def generate(context, builder, signature, arguments):
        fma = builder.module.declare_intrinsic(f"llvm.fma.v{LANES}f32", (), ir.FunctionType(kind, [kind] * 3))
        sums, weights, x = ([_part(builder, value, i) for i in range(value.type.count // LANES)] for value in arguments)
        pairs = [(row, vector) for row in range(rows) for vector in range(vectors)]
        added = [builder.call(fma, [weights[r], x[v], old]) for (r, v), old in zip(pairs, sums, strict=True)]
        return simd.join(builder, added)

    return sums(sums, weights, x), generate


@intrinsic(prefer_literal=True)
def part(typing_context, vector, index):
    """The `LANES` lanes of one pair of row and vector."""

    def generate(context, builder, signature, arguments):
        return _part(builder, arguments[0], index.literal_value)

    return Vector(vector.element, LANES)(vector, index), generate


def _part(builder, value, index: int) -> ir.Value:
    return simd.take(builder, value, range(index * LANES, (index + 1) * LANES))


@cache
def tile(rows: int, vectors: int):
    """The function that gives the sums in lanes of so many rows (1 or 4) and vectors (1 or 4), from these on."""
    size = rows * vectors * LANES
    step = CACHE_LINE // LANES  # prefetch once a cache line

    @numba.njit(inline="always")
    def tile(weight, x, row, vector):
        columns = x.shape[1]
        sums, at = zeros(size), row * columns
        for index in range(columns // LANES):
            if index % step == 0:
                for r in range(rows):
                    prefetch(weight, at + r * columns + PREFETCH_BYTES)
            weights = int8_lanes(load_rows(weight, at, columns, rows))
            sums = add_products(sums, weights, load_rows(x, vector * columns + index * LANES, columns, vectors))
            at += LANES
        return sums

    return tile


@numba.njit(inline="always")
def finish(sums, weight, x, row, vector, y):
    """Set an element of `y` to the sum over the lanes and the columns that filled no whole vector."""
    result = total(sums)
    for column in range(x.shape[1] // LANES * LANES, x.shape[1]):
        result += numba.float32(weight[row, column]) * x[vector, column]
    y[vector, row] = result


def matvec(batch: int):
    """The function that sets `y[vector, row] = Σ weight[row, column] · x[vector, column]`, summed in fp32."""
    return _rows_at_once() if batch < VECTORS else _vectors_at_once()


@cache
def _rows_at_once():
    four, one = tile(ROWS, 1), tile(1, 1)

    @numba.njit(**COMPILE)
    def matvec(weight, x, y, first, last):
        whole = first + (last - first) // ROWS * ROWS
        for row in range(first, whole, ROWS):
            for vector in range(len(x)):
                sums = four(weight, x, row, vector)
                finish(part(sums, 0), weight, x, row, vector, y)
                finish(part(sums, 1), weight, x, row + 1, vector, y)
                finish(part(sums, 2), weight, x, row + 2, vector, y)
                finish(part(sums, 3), weight, x, row + 3, vector, y)
        for row in range(whole, last):
            for vector in range(len(x)):
                finish(one(weight, x, row, vector), weight, x, row, vector, y)

    return matvec


@cache
def _vectors_at_once():
    four, one = tile(1, VECTORS), tile(1, 1)

    @numba.njit(**COMPILE)
    def matvec(weight, x, y, first, last):
        whole = len(x) // VECTORS * VECTORS
        for row in range(first, last):
            for vector in range(0, whole, VECTORS):
                sums = four(weight, x, row, vector)
                finish(part(sums, 0), weight, x, row, vector, y)
                finish(part(sums, 1), weight, x, row, vector + 1, y)
                finish(part(sums, 2), weight, x, row, vector + 2, y)
                finish(part(sums, 3), weight, x, row, vector + 3, y)
            for vector in range(whole, len(x)):
                finish(one(weight, x, row, vector), weight, x, row, vector, y)

    return matvec

"""Dense rows times a vector, with SIMD: what the families that hold or decode dense rows share."""

from functools import cache

import numba
import torch
from numba import types
from numba.extending import intrinsic

from toolkit.kernels.engine import simd
from toolkit.kernels.engine.compiled import compiled
from toolkit.kernels.engine.elements import TO_FLOAT32
from toolkit.kernels.engine.simd import (
    CACHE_LINE,
    LANES_TO_FLOAT32,
    Vector,
    fma,
    item,
    prefetch,
    prefetch_l2,
    totals,
    zeros,
)

LANES = 16  # in which a row is summed
ROWS = 4  # multiplied at once, which share what they read of x
NEAR_BYTES = 512  # how far ahead in a row the first cache is asked for its elements
# rows and vectors at once where there are several vectors, as many as the registers hold: a weight in fp32 serves all
TILES = {"avx512f": (4, 4), "avx2": (2, 2)}


@intrinsic(prefer_literal=True)
def load_tile(typing_context, array, at, stride, times, stretches, lanes):
    """The `lanes` elements from `at` so many times, then those from `at + stride` and so on, as one vector."""
    vector = Vector(array.dtype, times.literal_value * stretches.literal_value * lanes.literal_value)

    def generate(context, builder, signature, arguments):
        data, place, stride = arguments[:3]
        kind, parts = context.get_value_type(Vector(array.dtype, lanes.literal_value)), []
        for _ in range(stretches.literal_value):
            source = simd.pointer(context, builder, array, data, place, kind)
            parts += [builder.load(source, align=array.dtype.bitwidth // 8)] * times.literal_value
            place = builder.add(place, stride)
        return simd.join(builder, parts)

    return vector(array, types.int64, types.int64, times, stretches, lanes), generate


@intrinsic(prefer_literal=True)
def repeat(typing_context, vector, times):
    """The vector, so many times one after another."""
    repeated = Vector(vector.element, vector.lanes * times.literal_value)

    return repeated(vector, times), lambda context, builder, signature, arguments: simd.take(
        builder, arguments[0], [*range(vector.lanes)] * times.literal_value
    )


@intrinsic(prefer_literal=True)
def store_rows(typing_context, array, at, stride, vector, rows):
    """Write the first `rows` lanes from `at` on, the next ones from `at + stride` on and so on."""

    def generate(context, builder, signature, arguments):
        array_value, place, stride, value = arguments[:4]
        count = rows.literal_value
        for first in range(0, vector.lanes, count):
            some = simd.take(builder, value, range(first, first + count))
            target = simd.pointer(context, builder, array, array_value, place, some.type)
            builder.store(some, target, align=array.dtype.bitwidth // 8)
            place = builder.add(place, stride)

    return types.void(array, types.int64, types.int64, vector, rows), generate


@cache
def multiply_tile(rows: int, vectors: int, dtype: torch.dtype):
    """The function that does what `multiply_rows` says for so many rows and the vectors from `vector` on.

    Meanwhile the second cache is asked for the rows behind these, since the hardware's own prefetching stops at the end
    of a page, and the first cache for what comes next in these.
    """
    lanes_to_float32, to_float32 = LANES_TO_FLOAT32[dtype], TO_FLOAT32[dtype]
    line, near = CACHE_LINE // dtype.itemsize, NEAR_BYTES // dtype.itemsize
    steps, lanes, behind = max(1, line // LANES), rows * vectors * LANES, 1 if rows == 1 else ROWS

    @numba.njit(inline="always")
    def add(weight, at, stride, x, place, sums):
        weights = lanes_to_float32(load_tile(weight, at, stride, 1, rows, LANES))
        return fma(repeat(weights, vectors), load_tile(x, place, x.shape[1], rows, vectors, LANES), sums)

    @compiled(forceinline=True)
    def multiply_tile(weight, at, stride, x, vector, y, place):
        columns, sums, column = x.shape[1], zeros(lanes), vector * x.shape[1]
        begin, whole = at, at + columns // LANES * LANES
        for _ in range(columns // (LANES * steps)):
            for r in range(rows):
                prefetch_l2(weight, at + (r + behind) * stride)
                prefetch(weight, at + r * stride + near)
            for _ in range(steps):
                sums = add(weight, at, stride, x, column, sums)
                at += LANES
                column += LANES
        while at < whole:
            sums = add(weight, at, stride, x, column, sums)
            at += LANES
            column += LANES
        store_rows(y, vector * y.shape[1] + place, y.shape[1], totals(sums, LANES), rows)
        for v in range(vector, vector + vectors):
            for r in range(rows):
                for rest in range(whole - begin, columns):
                    y[v, place + r] += to_float32(item(weight, begin + r * stride + rest)) * x[v, rest]

    return multiply_tile


@cache
def multiply_rows(dtype: torch.dtype):
    """The function that sets `y[vector, place + i]` to the product of row i with a vector, for 4 or 1 rows.

    That is Σ weight.flat[at + i · stride + column] · x[vector, column] over the columns of x. `weight` holds elements
    of `dtype`, those of 16 bits as their bits. A row's sum is the same, to the bit, for any number of rows and vectors.
    """
    at_once, vectors = TILES["avx512f"] if simd.has("avx512f") else TILES["avx2"]
    of_one, of_four, of_tile = (multiply_tile(*tile, dtype) for tile in ((1, 1), (ROWS, 1), (at_once, vectors)))

    @compiled
    def multiply_rows(weight, at, stride, rows, x, y, place):
        if rows == 1:
            for vector in range(len(x)):
                of_one(weight, at, stride, x, vector, y, place)
            return
        tiled = len(x) // vectors * vectors
        for vector in range(0, tiled, vectors):
            for i in range(0, ROWS, at_once):
                of_tile(weight, at + i * stride, stride, x, vector, y, place + i)
        for vector in range(tiled, len(x)):
            of_four(weight, at, stride, x, vector, y, place)

    return multiply_rows


@cache
def dense_product(dtype: torch.dtype):
    """The function that sets `y[vector, row] = Σ weight[row, column] · x[vector, column]`, rows `first` to `last`."""
    multiply = multiply_rows(dtype)

    @compiled
    def dense_product(weight, x, y, first, last):
        columns, whole = x.shape[1], first + (last - first) // ROWS * ROWS
        for row in range(first, whole, ROWS):
            multiply(weight, row * columns, columns, ROWS, x, y, row)
        for row in range(whole, last):
            multiply(weight, row * columns, columns, 1, x, y, row)

    return dense_product

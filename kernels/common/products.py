"""Dense rows times a vector, with SIMD: what the families that hold or decode dense rows share."""

from functools import cache

import numba
import torch
from numba import types
from numba.extending import intrinsic

from toolkit.kernels.common import simd
from toolkit.kernels.common.compiled import compiled
from toolkit.kernels.common.elements import TO_FLOAT32
from toolkit.kernels.common.simd import CACHE_LINE, Vector, fma, item, prefetch, prefetch_l2, total, zeros

LANES = 16  # in which a row is summed
ROWS = 4  # multiplied at once, which share what they read of x
NEAR_BYTES = 512  # how far ahead in a row the first cache is asked for its elements
TILE = 2  # rows and vectors at once where there are several vectors: a weight in fp32 serves both

LANES_TO_FLOAT32 = {
    torch.float32: simd.float32_lanes,
    torch.float16: simd.float16_lanes,
    torch.bfloat16: simd.bfloat16_lanes,
    torch.int8: simd.int8_lanes,
}


@intrinsic(prefer_literal=True)
def load_rows(typing_context, array, at, stride, rows):
    """The `LANES` elements from `at`, those from `at + stride` and so on, as one vector."""
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
def row_lanes(typing_context, sums, row):
    """The lanes of one row."""

    def generate(context, builder, signature, arguments):
        lanes = range(row.literal_value * LANES, (row.literal_value + 1) * LANES)
        return simd.take(builder, arguments[0], lanes)

    return Vector(sums.element, LANES)(sums, row), generate


@cache
def lane_sums(rows: int, vectors: int, dtype: torch.dtype):
    """The function that gives Σ weight.flat[at + i · stride + column] · x[vector, column] in lanes, for so many rows i.

    It returns two results, one a vector; with `vectors` of 1 the second is zeros. `dtype` is the weight's. Meanwhile
    the second cache is asked for the rows behind these, since the hardware's own prefetching stops at the end of a
    page, and the first cache for what comes next in these.
    """
    lanes, line = rows * LANES, CACHE_LINE // dtype.itemsize
    to_float32, steps = LANES_TO_FLOAT32[dtype], max(1, line // LANES)
    behind, near = 1 if rows == 1 else ROWS, NEAR_BYTES // dtype.itemsize

    @numba.njit(inline="always")
    def add(weight, at, stride, x, place, first, second):
        weights = to_float32(load_rows(weight, at, stride, rows))
        first = fma(weights, load_rows(x, place, 0, rows), first)
        if vectors == TILE:
            second = fma(weights, load_rows(x, place + x.shape[1], 0, rows), second)
        return first, second

    @compiled
    def lane_sums(weight, at, stride, x, vector):
        columns = x.shape[1]
        first, second, place = zeros(lanes), zeros(lanes), vector * columns
        for _ in range(columns // (LANES * steps)):
            for r in range(rows):
                prefetch_l2(weight, at + (r + behind) * stride)
                prefetch(weight, at + r * stride + near)
            for _ in range(steps):
                first, second = add(weight, at, stride, x, place, first, second)
                at += LANES
                place += LANES
        for _ in range(columns // LANES % steps):
            first, second = add(weight, at, stride, x, place, first, second)
            at += LANES
            place += LANES
        return first, second

    return lane_sums


@cache
def multiply_rows(dtype: torch.dtype):
    """The function that sets `y[vector, place + i]` to the product of row i with a vector, for 4 or 1 rows.

    That is Σ weight.flat[at + i · stride + column] · x[vector, column] over the columns of x. `weight` holds elements
    of `dtype`, those of 16 bits as their bits. A row's sum is the same, to the bit, for any number of rows and vectors.
    """
    to_float32 = TO_FLOAT32[dtype]
    of_four, of_one = (lane_sums(rows, 1, dtype) for rows in (ROWS, 1))
    of_tile = lane_sums(TILE, TILE, dtype)  # a larger one does not fit in AVX2's 16 registers

    @compiled
    def finish(sums, weight, at, x, vector, y, place):
        result = total(sums)
        for column in range(x.shape[1] // LANES * LANES, x.shape[1]):
            result += to_float32(item(weight, at + column)) * x[vector, column]
        y[vector, place] = result

    @numba.njit(inline="always")
    def multiply_four(weight, at, stride, x, y, place):
        tiled = len(x) // TILE * TILE
        for vector in range(0, tiled, TILE):
            for i in range(0, ROWS, TILE):
                row, next_row = at + i * stride, at + (i + 1) * stride
                first, second = of_tile(weight, row, stride, x, vector)
                finish(row_lanes(first, 0), weight, row, x, vector, y, place + i)
                finish(row_lanes(first, 1), weight, next_row, x, vector, y, place + i + 1)
                finish(row_lanes(second, 0), weight, row, x, vector + 1, y, place + i)
                finish(row_lanes(second, 1), weight, next_row, x, vector + 1, y, place + i + 1)
        for vector in range(tiled, len(x)):
            sums, _ = of_four(weight, at, stride, x, vector)
            finish(row_lanes(sums, 0), weight, at, x, vector, y, place)
            finish(row_lanes(sums, 1), weight, at + stride, x, vector, y, place + 1)
            finish(row_lanes(sums, 2), weight, at + 2 * stride, x, vector, y, place + 2)
            finish(row_lanes(sums, 3), weight, at + 3 * stride, x, vector, y, place + 3)

    @compiled
    def multiply_rows(weight, at, stride, rows, x, y, place):
        if rows == ROWS:
            multiply_four(weight, at, stride, x, y, place)
        else:
            for vector in range(len(x)):
                sums, _ = of_one(weight, at, stride, x, vector)
                finish(sums, weight, at, x, vector, y, place)

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

"""Dense rows times a vector, with SIMD: what the families that hold or decode dense rows share."""

from functools import cache

import numba
import torch
from numba import types
from numba.extending import intrinsic

from toolkit.kernels.common import simd
from toolkit.kernels.common.simd import CACHE_LINE, Vector, fma, prefetch_l2, total, zeros

LANES = 16  # in which a row is summed
ROWS = 4  # multiplied at once, which share what they read of x

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
def lane_sums(rows: int, to_float32):
    """The function that gives Σ weight[row, column] · x[vector, column] in lanes, for so many rows from `row` on.

    `to_float32` turns a vector of the weight's elements into fp32. Meanwhile the second cache fetches as many rows
    behind these: the hardware's own prefetching stops at the end of a page, and the first cache has no room beside `x`.
    """
    lanes = rows * LANES

    @numba.njit(inline="always")
    def lane_sums(weight, x, row, vector):
        columns = x.shape[1]
        step = max(1, CACHE_LINE // (LANES * weight.itemsize))
        sums, at = zeros(lanes), row * columns
        for index in range(columns // LANES):
            if index % step == 0:
                for r in range(rows, 2 * rows):
                    prefetch_l2(weight, at + r * columns)
            weights = to_float32(load_rows(weight, at, columns, rows))
            sums = fma(weights, load_rows(x, vector * columns + index * LANES, 0, rows), sums)
            at += LANES
        return sums

    return lane_sums


@cache
def multiply_rows(lanes_to_float32, to_float32):
    """The function that sets `y[vector, place + i] = Σ weight[row + i, column] · x[vector, column]` for 4 or 1 rows.

    Given how to turn a vector of elements, and one element, into fp32. A row's sum is the same, to the bit, in both.
    """
    of_four, of_one = lane_sums(ROWS, lanes_to_float32), lane_sums(1, lanes_to_float32)

    @numba.njit(inline="always")
    def finish(sums, weight, row, x, vector, y, place):
        result = total(sums)
        for column in range(x.shape[1] // LANES * LANES, x.shape[1]):
            result += to_float32(weight[row, column]) * x[vector, column]
        y[vector, place] = result

    @numba.njit(inline="always")
    def multiply_rows(weight, row, rows, x, y, place):
        for vector in range(len(x)):
            if rows == ROWS:
                sums = of_four(weight, x, row, vector)
                finish(row_lanes(sums, 0), weight, row, x, vector, y, place)
                finish(row_lanes(sums, 1), weight, row + 1, x, vector, y, place + 1)
                finish(row_lanes(sums, 2), weight, row + 2, x, vector, y, place + 2)
                finish(row_lanes(sums, 3), weight, row + 3, x, vector, y, place + 3)
            else:
                finish(of_one(weight, x, row, vector), weight, row, x, vector, y, place)

    return multiply_rows

"""The int8 product for CPUs with SIMD.

Weights are sign-extended, converted to fp32 and multiplied: three instructions a register. Four rows at once share what
they read of `x`. Meanwhile the second cache fetches the next four: the hardware's own prefetching stops at the end of
each page, and the first cache has no room beside `x`.
"""

import numba
from numba import types
from numba.extending import intrinsic

from toolkit.kernels.common import simd
from toolkit.kernels.common.simd import CACHE_LINE, Vector, fma, int8_lanes, prefetch_l2, total, zeros
from toolkit.kernels.common.threads import COMPILE

LANES = 16  # in which a row is summed
ROWS = 4  # multiplied at once


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


def lane_sums(rows: int):
    """The function that gives Σ weight[row, column] · x[vector, column] in lanes, for so many rows from `row` on."""
    lanes = rows * LANES

    @numba.njit(inline="always")
    def lane_sums(weight, x, row, vector):
        columns = x.shape[1]
        sums, at = zeros(lanes), row * columns
        for index in range(columns // LANES):
            if index % (CACHE_LINE // LANES) == 0:
                for r in range(rows, 2 * rows):
                    prefetch_l2(weight, at + r * columns)
            weights = int8_lanes(load_rows(weight, at, columns, rows))
            sums = fma(weights, load_rows(x, vector * columns + index * LANES, 0, rows), sums)
            at += LANES
        return sums

    return lane_sums


sums_of_rows, sums_of_one = lane_sums(ROWS), lane_sums(1)


@numba.njit(inline="always")
def finish(sums, weight, x, row, vector, y):
    """Set an element of `y` to the sum over the lanes and the columns that filled no whole vector."""
    result = total(sums)
    for column in range(x.shape[1] // LANES * LANES, x.shape[1]):
        result += numba.float32(weight[row, column]) * x[vector, column]
    y[vector, row] = result


@numba.njit(**COMPILE)
def matvec(weight, x, y, first, last):
    """Set `y[vector, row] = Σ weight[row, column] · x[vector, column]`, summed in fp32, for rows `first` to `last`."""
    whole = first + (last - first) // ROWS * ROWS
    for row in range(first, whole, ROWS):
        for vector in range(len(x)):
            sums = sums_of_rows(weight, x, row, vector)
            finish(row_lanes(sums, 0), weight, x, row, vector, y)
            finish(row_lanes(sums, 1), weight, x, row + 1, vector, y)
            finish(row_lanes(sums, 2), weight, x, row + 2, vector, y)
            finish(row_lanes(sums, 3), weight, x, row + 3, vector, y)
    for row in range(whole, last):
        for vector in range(len(x)):
            finish(sums_of_one(weight, x, row, vector), weight, x, row, vector, y)

"""The FFN of some neurons for CPUs with SIMD: four neurons at once, and each weight is read from memory once."""

from functools import cache

import numba
import torch

from toolkit.kernels.common.compiled import compiled
from toolkit.kernels.common.elements import TO_FLOAT32
from toolkit.kernels.common.products import LANES_TO_FLOAT32, NEAR_BYTES, multiply_rows
from toolkit.kernels.common.simd import CACHE_LINE, fma, item, load, prefetch, splat, store
from toolkit.kernels.neurons.shared import ROWS, ffn_of_parts

LANES = 64  # of the sums that stay in registers while four columns are added


@cache
def ffn(dtype: torch.dtype, activation: str, gated: bool):
    """The function of parts, as `ffn_of_parts` describes it."""
    lanes_to_float32, to_float32 = LANES_TO_FLOAT32[dtype], TO_FLOAT32[dtype]
    line, near = CACHE_LINE // dtype.itemsize, NEAR_BYTES // dtype.itemsize

    @numba.njit(inline="always")
    def ask(bundles, at):
        for nearer in range(0, LANES, line):
            prefetch(bundles, at + near + nearer)

    @numba.njit(inline="always")
    def add_lanes(bundles, at, value, sums):
        return fma(lanes_to_float32(load(bundles, at, LANES)), splat(value, LANES), sums)

    @numba.njit(inline="always")
    def add_four(bundles, places, values, vector, first, sums):
        a, b, c, d = places[first], places[first + 1], places[first + 2], places[first + 3]
        of_a, of_b, of_c, of_d = (
            values[vector, first],
            values[vector, first + 1],
            values[vector, first + 2],
            values[vector, first + 3],
        )
        for column in range(0, sums.shape[1] // LANES * LANES, LANES):
            ask(bundles, a + column)
            ask(bundles, b + column)
            ask(bundles, c + column)
            ask(bundles, d + column)
            place = vector * sums.shape[1] + column
            total = add_lanes(bundles, a + column, of_a, load(sums, place, LANES))
            total = add_lanes(bundles, b + column, of_b, total)
            total = add_lanes(bundles, c + column, of_c, total)
            store(sums, place, add_lanes(bundles, d + column, of_d, total))

    @numba.njit(inline="always")
    def add_one(bundles, at, value, vector, begin, sums):
        hidden = sums.shape[1]
        whole, place = hidden // LANES * LANES, vector * hidden
        for column in range(begin, whole, LANES):
            store(sums, place + column, add_lanes(bundles, at + column, value, load(sums, place + column, LANES)))
        for column in range(max(begin, whole), hidden):
            sums[vector, column] += value * to_float32(item(bundles, at + column))

    @compiled
    def add_columns(bundles, places, values, first, rows, sums):
        for vector in range(len(sums)):
            begin = 0
            if rows == ROWS:
                add_four(bundles, places, values, vector, first, sums)
                begin = sums.shape[1] // LANES * LANES
            for i in range(first, first + rows):
                add_one(bundles, places[i], values[vector, i], vector, begin, sums)

    return ffn_of_parts(multiply_rows(dtype), add_columns, activation, gated)

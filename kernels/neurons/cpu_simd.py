"""The FFN of some neurons for CPUs with SIMD: four neurons at once, and each weight is read from memory once."""

from collections.abc import Callable
from functools import cache

import numba
import torch

from toolkit.kernels.engine.compiled import compiled
from toolkit.kernels.engine.elements import TO_FLOAT32
from toolkit.kernels.engine.products import NEAR_BYTES, multiply_listed
from toolkit.kernels.engine.simd import CACHE_LINE, LANES_TO_FLOAT32, fma, item, load, prefetch, splat, store
from toolkit.kernels.neurons.shared import ROWS, ffn_of_parts

LANES = 64  # of the sums that stay in registers while four columns are added


def adding(weights_of: Callable, rest_of: Callable):
    """The function that adds down columns, as `ffn_of_parts` describes it.

    `weights_of(given, at, column, row, hidden)` gives the 64 weights from a column on of the section that begins at
    `at`, which is the one with the number `row` of four; `rest_of(given, at)` gives one of those behind the last 64.
    """

    @compiled
    def add_columns(given, places, values, first, rows, sums):
        hidden = sums.shape[1]
        whole = hidden // LANES * LANES
        a = places[first]
        if rows == ROWS:
            b, c, d = places[first + 1], places[first + 2], places[first + 3]
            for column in range(0, whole, LANES):
                of_a, of_b = weights_of(given, a, column, 0, hidden), weights_of(given, b, column, 1, hidden)
                of_c, of_d = weights_of(given, c, column, 2, hidden), weights_of(given, d, column, 3, hidden)
                for vector in range(len(sums)):
                    place = vector * hidden + column
                    total = fma(of_a, splat(values[vector, first], LANES), load(sums, place, LANES))
                    total = fma(of_b, splat(values[vector, first + 1], LANES), total)
                    total = fma(of_c, splat(values[vector, first + 2], LANES), total)
                    store(sums, place, fma(of_d, splat(values[vector, first + 3], LANES), total))
        else:
            for column in range(0, whole, LANES):
                weights = weights_of(given, a, column, 0, hidden)
                for vector in range(len(sums)):
                    place = vector * hidden + column
                    store(sums, place, fma(weights, splat(values[vector, first], LANES), load(sums, place, LANES)))
        for row in range(first, first + rows):
            for column in range(whole, hidden):
                weight = rest_of(given, places[row] + column)
                for vector in range(len(sums)):
                    sums[vector, column] += values[vector, row] * weight

    return add_columns


@cache
def ffn(dtype: torch.dtype):
    """The function of parts, as `ffn_of_parts` describes it."""
    lanes_to_float32, to_float32 = LANES_TO_FLOAT32[dtype], TO_FLOAT32[dtype]
    line, near = CACHE_LINE // dtype.itemsize, NEAR_BYTES // dtype.itemsize

    @numba.njit(inline="always")
    def weights_of(bundles, at, column, row, hidden):
        for nearer in range(0, LANES, line):
            prefetch(bundles, at + column + near + nearer)
        return lanes_to_float32(load(bundles, at + column, LANES))

    @numba.njit(inline="always")
    def rest_of(bundles, at):
        return to_float32(item(bundles, at))

    return ffn_of_parts(multiply_listed(dtype), adding(weights_of, rest_of))

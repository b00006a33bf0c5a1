"""The FFN of some neurons for CPUs with SIMD: four neurons at once, and each weight is read from memory once."""

from functools import cache

import numba
import torch

from toolkit.kernels.common.elements import TO_FLOAT32
from toolkit.kernels.common.products import LANES_TO_FLOAT32, NEAR_BYTES, multiply_rows
from toolkit.kernels.common.simd import CACHE_LINE, fma, item, load, prefetch, splat, store
from toolkit.kernels.neurons.shared import ROWS, ffn_of_parts
from toolkit.kernels.runtime.compiled import compiled

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
    def weights_from(bundles, at):
        return lanes_to_float32(load(bundles, at, LANES))

    @compiled
    def add_four(bundles, places, values, first, sums):
        hidden = sums.shape[1]
        a, b, c, d = places[first], places[first + 1], places[first + 2], places[first + 3]
        for column in range(0, hidden // LANES * LANES, LANES):
            ask(bundles, a + column)
            ask(bundles, b + column)
            ask(bundles, c + column)
            ask(bundles, d + column)
            of_a, of_b = weights_from(bundles, a + column), weights_from(bundles, b + column)
            of_c, of_d = weights_from(bundles, c + column), weights_from(bundles, d + column)
            for vector in range(len(sums)):
                place = vector * hidden + column
                total = fma(of_a, splat(values[vector, first], LANES), load(sums, place, LANES))
                total = fma(of_b, splat(values[vector, first + 1], LANES), total)
                total = fma(of_c, splat(values[vector, first + 2], LANES), total)
                store(sums, place, fma(of_d, splat(values[vector, first + 3], LANES), total))

    @compiled
    def add_one(bundles, at, values, row, begin, sums):
        hidden = sums.shape[1]
        whole = hidden // LANES * LANES
        for vector in range(len(sums)):
            place, value = vector * hidden, values[vector, row]
            for column in range(begin, whole, LANES):
                total = fma(weights_from(bundles, at + column), splat(value, LANES), load(sums, place + column, LANES))
                store(sums, place + column, total)
            for column in range(max(begin, whole), hidden):
                sums[vector, column] += value * to_float32(item(bundles, at + column))

    @compiled
    def add_columns(bundles, places, values, first, rows, sums):
        done = 0
        if rows == ROWS:
            add_four(bundles, places, values, first, sums)
            done = sums.shape[1] // LANES * LANES
        if done < sums.shape[1]:
            for row in range(first, first + rows):
                add_one(bundles, places[row], values, row, done, sums)

    return ffn_of_parts(multiply_rows(dtype), add_columns, activation, gated)

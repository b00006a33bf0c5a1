"""The FFN of some neurons for CPUs with SIMD: every weight is read once, in the order in which it lies in memory."""

from functools import cache

import numba
import torch

from toolkit.kernels.common.elements import TO_FLOAT32
from toolkit.kernels.common.products import LANES_TO_FLOAT32
from toolkit.kernels.common.simd import CACHE_LINE, fma, item, load, prefetch_l2, splat, store, total, zeros
from toolkit.kernels.neurons.shared import ffn_of_parts

LANES = 64  # four registers of AVX-512: enough sums beside each other to hide the time that one addition takes


@cache
def ffn(dtype: torch.dtype, activation: str, gated: bool):
    """The function of parts, as `ffn_of_parts` describes it."""
    lanes_to_float32, to_float32 = LANES_TO_FLOAT32[dtype], TO_FLOAT32[dtype]
    line = CACHE_LINE // dtype.itemsize  # elements

    @numba.njit(inline="always")
    def dot(bundles, at, ahead, x, vector):
        hidden, sums = x.shape[1], zeros(LANES)
        whole, place = hidden // LANES * LANES, vector * hidden
        for column in range(0, whole, LANES):
            for nearer in range(0, LANES, line):
                prefetch_l2(bundles, at + ahead + column + nearer)
            sums = fma(lanes_to_float32(load(bundles, at + column, LANES)), load(x, place + column, LANES), sums)
        result = total(sums)
        for column in range(whole, hidden):
            result += to_float32(item(bundles, at + column)) * item(x, place + column)
        return result

    @numba.njit(inline="always")
    def add_scaled(bundles, at, value, sums):
        hidden, values = len(sums), splat(value, LANES)
        whole = hidden // LANES * LANES
        for column in range(0, whole, LANES):
            weights = lanes_to_float32(load(bundles, at + column, LANES))
            store(sums, column, fma(weights, values, load(sums, column, LANES)))
        for column in range(whole, hidden):
            sums[column] += value * to_float32(item(bundles, at + column))

    return ffn_of_parts(dot, add_scaled, activation, gated)

"""The FFN of some neurons for any CPU: plain loops, which LLVM vectorises for the CPU at hand."""

from functools import cache

import numba
import torch

from toolkit.kernels.common.elements import TO_FLOAT32
from toolkit.kernels.neurons.shared import ffn_of_parts
from toolkit.kernels.runtime.compiled import compiled


@cache
def ffn(dtype: torch.dtype, activation: str, gated: bool):
    """The function of parts, as `ffn_of_parts` describes it."""
    to_float32 = TO_FLOAT32[dtype]

    @compiled(fastmath={"reassoc", "nsz", "contract"})
    def dot(bundles, at, x):
        weights, total = bundles.reshape(-1), numba.float32(0)
        for column in range(len(x)):
            total += to_float32(weights[at + column]) * x[column]
        return total

    @numba.njit(inline="always")
    def multiply(bundles, at, stride, rows, x, y, place):
        for i in range(rows):
            for vector in range(len(x)):
                y[vector, place + i] = dot(bundles, at + i * stride, x[vector])

    @compiled
    def add_scaled(bundles, at, value, sums):
        weights = bundles.reshape(-1)
        for column in range(len(sums)):
            sums[column] += value * to_float32(weights[at + column])

    @numba.njit(inline="always")
    def add_columns(bundles, places, values, first, rows, sums):
        for i in range(first, first + rows):
            for vector in range(len(sums)):
                add_scaled(bundles, places[i], values[vector, i], sums[vector])

    return ffn_of_parts(multiply, add_columns, activation, gated)

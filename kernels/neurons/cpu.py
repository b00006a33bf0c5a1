"""The FFN of some neurons for any CPU: plain loops, which LLVM vectorises for the CPU at hand."""

from functools import cache

import numba
import torch

from toolkit.kernels.common.compiled import compiled
from toolkit.kernels.common.elements import TO_FLOAT32
from toolkit.kernels.neurons.shared import ffn_of_parts


@cache
def ffn(dtype: torch.dtype, activation: str, gated: bool):
    """The function of parts, as `ffn_of_parts` describes it."""
    to_float32 = TO_FLOAT32[dtype]

    @compiled(fastmath={"reassoc", "nsz", "contract"})
    def dot(bundles, at, ahead, x, vector):
        weights, total = bundles.reshape(-1), numba.float32(0)
        for column in range(x.shape[1]):
            total += to_float32(weights[at + column]) * x[vector, column]
        return total

    @compiled
    def add_scaled(bundles, at, value, sums):
        weights = bundles.reshape(-1)
        for column in range(len(sums)):
            sums[column] += value * to_float32(weights[at + column])

    return ffn_of_parts(dot, add_scaled, activation, gated)

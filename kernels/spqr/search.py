"""The two searches of SpQR's quantiser: which weights of a group are outliers, and which codes a row's statistics get.

Both try every candidate for each group of a row. The rows of a tile lie side by side for that, so that LLVM vectorises
the inner loops over them.
"""

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.nn.functional import pad

from toolkit.kernels.runtime.compiled import compiled
from toolkit.kernels.runtime.threads import over_rows
from toolkit.kernels.spqr.layout import LEVELS, TILE

LARGEST = LEVELS - 1
PAIRS = LEVELS * LEVELS


def leave_one_out_gains(
    weight: Float[Tensor, "rows group"], diagonal: Float[Tensor, " group"]
) -> Float[Tensor, "rows group"]:
    """How much a group's squared error falls when this weight is an outlier and the others are rounded without it.

    Errors are over the diagonal of the Hessian's inverse factor, as GPTQ weighs them; scales and zero points are not
    quantised here.
    """
    lanes = _lanes(weight)
    gains = torch.empty_like(lanes)
    arrays = (lanes.numpy(), diagonal.to(weight.dtype).contiguous().numpy(), gains.numpy())
    over_rows(_gains, len(lanes), lanes.nbytes * TILE, *arrays)
    return gains.transpose(1, 2).flatten(0, 1)[: len(weight)]


def best_pairs(
    weight: Float[Tensor, "rows group"],
    importance: Float[Tensor, "rows group"],
    scales: Float[Tensor, "rows 8"],
    zeros: Float[Tensor, "rows 8"],
) -> tuple[Int64[Tensor, " rows"], Int64[Tensor, " rows"]]:
    """For each row the codes of scale and zero point that give the least sum of importance times squared error.

    `scales` and `zeros` are what the codes stand for. Scales below zero and above fp16's range are left out, and the
    first pair wins ties.
    """
    lanes = [_lanes(matrix.to(weight.dtype)) for matrix in (weight, importance, scales, zeros)]
    best = torch.zeros(len(lanes[0]), TILE, dtype=torch.int64)
    over_rows(_pairs, len(best), lanes[0].nbytes * PAIRS, *(array.numpy() for array in (*lanes, best)))
    best = best.flatten()[: len(weight)]
    return best // LEVELS, best % LEVELS


def _lanes(matrix: Float[Tensor, "rows columns"]) -> Float[Tensor, "tiles columns 16"]:
    """The matrix as `[tile, column, row in tile]`, with rows of zeros in the last tile."""
    return pad(matrix, (0, 0, 0, -len(matrix) % TILE)).unflatten(0, (-1, TILE)).transpose(1, 2).contiguous()


@compiled
def _gains(weight, diagonal, gains, first, last):
    kind = weight.dtype.type
    low, high, scale, zero, errors = np.empty((5, TILE), weight.dtype)
    for tile in range(first, last):
        part, gain = weight[tile], gains[tile]
        for left in range(-1, len(part)):  # -1: all are rounded
            low[:], high[:] = 0, 0
            for column in range(len(part)):
                if column != left:
                    for lane in range(TILE):
                        low[lane] = min(low[lane], part[column, lane])
                        high[lane] = max(high[lane], part[column, lane])
            for lane in range(TILE):
                step = (high[lane] - low[lane]) / kind(LARGEST)
                scale[lane] = step if step > 0 else kind(1)
                zero[lane] = -low[lane] / scale[lane]
            errors[:] = 0
            for column in range(len(part)):
                for lane in range(TILE):
                    value = part[column, lane] if column != left else kind(0)
                    code = min(max(np.rint(value / scale[lane] + zero[lane]), kind(0)), kind(LARGEST))
                    error = ((code - zero[lane]) * scale[lane] - value) / diagonal[column]
                    errors[lane] += error * error
            if left < 0:
                for column in range(len(part)):
                    gain[column] = errors
            else:
                for lane in range(TILE):
                    gain[left, lane] -= errors[lane]


@compiled
def _pairs(weight, importance, scales, zeros, best, first, last):
    kind = weight.dtype.type
    steps = np.empty(weight.shape[1:], weight.dtype)
    errors, least = np.empty((2, TILE), weight.dtype)
    for tile in range(first, last):
        part, weighs, found = weight[tile], importance[tile], best[tile]
        least[:] = np.inf
        for pair in range(PAIRS):
            scale, zero = scales[tile, pair // LEVELS], zeros[tile, pair % LEVELS]
            if pair % LEVELS == 0:
                for column in range(len(part)):
                    for lane in range(TILE):
                        steps[column, lane] = part[column, lane] / (scale[lane] if scale[lane] != 0 else kind(1))
            errors[:] = 0
            for column in range(len(part)):
                for lane in range(TILE):
                    code = min(max(np.rint(steps[column, lane] + zero[lane]), kind(0)), kind(LARGEST))
                    error = (code - zero[lane]) * scale[lane] - part[column, lane]
                    errors[lane] += error * error * weighs[column, lane]
            for lane in range(TILE):  # a comparison with NaN is false
                if errors[lane] < least[lane] and scale[lane] >= 0:
                    least[lane] = errors[lane]
                    found[lane] = pair

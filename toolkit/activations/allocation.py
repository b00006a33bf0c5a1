"""Zeros shared out over layers by sensitivity: more for layers that lose little."""

import heapq
from collections.abc import Sequence
from itertools import pairwise

from jaxtyping import Float
from torch import Tensor

from toolkit.errors import UserError

TOLERANCE = 1e-9


def share_out(losses: Float[Tensor, "layers levels"], levels: Sequence[float], zeros: float) -> list[float]:
    """The share of zeros of each layer, whose mean is `zeros` or, by less than one step, above it.

    Every layer starts at the lowest level. Again and again the layer that loses the least by going one level up does so
    (TEAL: Liu et al., 2024, algorithm 1). `losses[layer, level]` is what a layer adds to the loss at that level;
    `levels` rise by equal steps, so that every step up gives as many zeros. If each layer's loss rises ever faster, and
    losses of layers add up, nothing better exists at these levels.

    Raises `UserError` for levels that do not rise by equal steps, or a mean outside of them.
    """
    steps = [high - low for low, high in pairwise(levels)]
    if not steps or min(steps) <= 0 or max(steps) - min(steps) > TOLERANCE or len(levels) != losses.shape[1]:
        raise UserError(f"levels {list(levels)}: expected {losses.shape[1]} shares of zeros that rise by equal steps")
    if not levels[0] <= zeros <= levels[-1]:
        raise UserError(f"share of zeros {zeros}: expected one from {levels[0]} to {levels[-1]}, the levels measured")
    table = losses.tolist()
    at = [0] * len(table)
    steps_up = [(row[1] - row[0], layer) for layer, row in enumerate(table)]
    heapq.heapify(steps_up)
    while sum(levels[level] for level in at) < zeros * len(at) - TOLERANCE:
        _, layer = heapq.heappop(steps_up)
        at[layer] += 1
        if at[layer] + 1 < len(levels):
            heapq.heappush(steps_up, (table[layer][at[layer] + 1] - table[layer][at[layer]], layer))
    return [levels[level] for level in at]

"""Attention by the rules of `toolkit.kernels.single_token.attention`, each vector and head by itself, in float64."""

import numpy as np
import torch
from torch import Tensor

SCALE = 0.3  # of scores


def attention(
    query: Tensor, keys: Tensor, values: Tensor, start: int, length: int, window: int, sinks: Tensor
) -> Tensor:
    """The result [vectors, heads, size], of the positions from `start` on; the first vector sees `length` of them."""
    vectors, heads, _ = query.shape
    found = torch.empty(query.shape, dtype=torch.float64)
    for vector, head in np.ndindex(vectors, heads):
        group, end = head // (heads // len(keys)), length + vector
        seen = slice(max(start, end - window if window else 0), end)
        scores = keys[group, seen].double() @ query[vector, head].double() * SCALE
        shares = torch.cat([scores, sinks[head : head + 1].double()]).softmax(0)[: len(scores)]
        found[vector, head] = shares @ values[group, seen].double()
    return found

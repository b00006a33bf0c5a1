"""Masks of the lowest scores, unstructured or in N:M patterns."""

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from toolkit.pattern import Pattern


def lowest(scores: Float[Tensor, "*batch n"], count: int) -> Bool[Tensor, "*batch n"]:
    """Mark exactly `count` of the lowest scores along the last dimension. The earlier of equal scores is marked."""
    if count == 0:
        return torch.zeros_like(scores, dtype=torch.bool)
    threshold = _at(scores, count - 1)
    below, equal = scores < threshold, scores == threshold
    missing = count - below.sum(dim=-1, keepdim=True)
    return below | (equal & (equal.cumsum(dim=-1, dtype=torch.int32) <= missing))


def _at(scores: Tensor, place: int) -> Tensor:
    """The score at a place of each row, were the row sorted."""
    if scores.device.type != "cpu" or scores.dtype == torch.bfloat16:
        return scores.kthvalue(place + 1, dim=-1, keepdim=True).values
    ordered = np.partition(scores.numpy(), place, axis=-1)  # in less than half the time of kthvalue
    return torch.from_numpy(ordered[..., place : place + 1])


def lowest_in_groups(scores: Float[Tensor, "rows columns"], pattern: Pattern) -> Bool[Tensor, "rows columns"]:
    """Mark the M − N lowest scores of every M consecutive ones of a row."""
    groups = scores.unflatten(1, (-1, pattern.group))
    return lowest(groups, pattern.group - pattern.kept).flatten(1)

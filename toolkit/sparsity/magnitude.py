"""Magnitude pruning, the baseline of the Wanda and SparseGPT papers: the smallest weights of a layer become zero."""

from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Float
from torch import Tensor

from toolkit.pattern import Pattern
from toolkit.sparsity.patterns import lowest, lowest_in_groups


@dataclass(frozen=True)
class Magnitude:
    """One threshold on |W| for the whole layer, or one per N:M group. Needs no data."""

    statistic: ClassVar[str | None] = None

    def __call__(
        self,
        weight: Float[Tensor, "rows columns"],
        gram: Float[Tensor, "columns columns"] | None,
        sparsity: float,
        pattern: Pattern | None,
    ) -> Float[Tensor, "rows columns"]:
        """Return the pruned float32 weight; `gram` is ignored."""
        scores = weight.abs()
        if pattern:
            mask = lowest_in_groups(scores, pattern)
        else:
            mask = lowest(scores.flatten(), int(scores.numel() * sparsity)).view_as(scores)
        return weight.masked_fill(mask, 0)

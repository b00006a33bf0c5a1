"""Wanda: Sun et al., "A Simple and Effective Pruning Approach for Large Language Models", ICLR 2024."""

from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Float
from torch import Tensor

from toolkit.pattern import Pattern
from toolkit.sparsity.patterns import lowest, lowest_in_groups


@dataclass(frozen=True)
class Wanda:
    """Scores |W_ij|·‖X_j‖₂, compared within each output row (section 3, equation 1). Kept weights do not change."""

    statistic: ClassVar[str | None] = "norms"

    def __call__(
        self,
        weight: Float[Tensor, "rows columns"],
        gram: Float[Tensor, "columns columns"] | Float[Tensor, " columns"],
        sparsity: float,
        pattern: Pattern | None,
    ) -> Float[Tensor, "rows columns"]:
        """Return the pruned float32 weight; `gram` is XᵀX, or its diagonal, the squared input norms, which is enough.

        Every row gets exactly int(columns · sparsity) zeros, or M − N in each N:M group.
        """
        scores = weight.abs() * (gram if gram.ndim == 1 else gram.diagonal()).sqrt()
        mask = lowest_in_groups(scores, pattern) if pattern else lowest(scores, int(scores.shape[1] * sparsity))
        return weight.masked_fill(mask, 0)

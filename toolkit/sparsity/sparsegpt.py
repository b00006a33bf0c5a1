"""SparseGPT: Frantar and Alistarh, "Massive Language Models Can Be Accurately Pruned in One-Shot", ICML 2023."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from toolkit.pattern import Pattern
from toolkit.sparsity.hessian import STEP, compensated, factorised, one_by_one
from toolkit.sparsity.patterns import lowest


@dataclass(frozen=True)
class SparseGPT:
    """Optimal-brain-surgeon pruning, column after column; later columns compensate for each loss.

    Algorithm 1. `damping` is that of `toolkit.sparsity.hessian.factorised`. Masks are chosen for `block_size`
    columns at once (N:M masks: at each group's first column). Columns to the right are updated after each block.
    """

    damping: float = 0.01
    block_size: int = 128
    statistic: ClassVar[str | None] = "gram"

    def __call__(
        self,
        weight: Float[Tensor, "rows columns"],
        gram: Float[Tensor, "columns columns"],
        sparsity: float,
        pattern: Pattern | None,
    ) -> Float[Tensor, "rows columns"]:
        """Return the pruned and updated float32 weight; `gram` = XᵀX stands for the Hessian 2XᵀX/n.

        A constant factor on the Hessian changes neither masks nor updates. Columns that no input ever reached become
        zero. Raises `UserError` as `factorised` does.
        """
        factor = factorised(gram, self.damping)
        columns = weight.T.contiguous()
        columns[gram.diagonal() == 0] = 0

        def choose(block: slice, wanted: Tensor, inverse: Tensor) -> None:
            diagonal, mask = inverse.diagonal()[:, None], torch.zeros_like(wanted, dtype=torch.bool)
            if not pattern:
                scores = (wanted / diagonal).square().T
                mask = lowest(scores.flatten(), int(scores.numel() * sparsity)).view_as(scores).T.contiguous()

            def fit(group: slice) -> None:
                if pattern:
                    scores = (wanted[group] / diagonal[group]).square().T
                    mask[group] = lowest(scores, pattern.group - pattern.kept).T

            def change(column: int) -> Tensor:
                return wanted[column].masked_fill(mask[column], 0)

            one_by_one(wanted, inverse, pattern.group if pattern else STEP, fit, change)

        return compensated(columns, factor, self._step(pattern), choose).T

    def _step(self, pattern: Pattern | None) -> int:
        """The block size, cut to whole N:M groups."""
        return max(self.block_size // pattern.group, 1) * pattern.group if pattern else self.block_size

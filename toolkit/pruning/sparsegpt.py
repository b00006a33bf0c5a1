"""SparseGPT: Frantar and Alistarh, "Massive Language Models Can Be Accurately Pruned in One-Shot", ICML 2023."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from toolkit.errors import UserError
from toolkit.pruning.patterns import lowest
from toolkit.sparsity import Pattern

STEP = 8  # columns updated one by one: small enough for one thread


@dataclass(frozen=True)
class SparseGPT:
    """Optimal-brain-surgeon pruning, column after column; later columns compensate for each loss.

    Algorithm 1. `damping` is added to the Hessian's diagonal as a share of its mean. Masks are chosen for `block_size`
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
        zero. Raises `UserError` if the damped Hessian is not positive definite.
        """
        factor = inverse_factor(gram, self.damping)
        weight = weight.masked_fill(gram.diagonal() == 0, 0)
        for start in range(0, weight.shape[1], self._step(pattern)):
            block, rest = slice(start, start + self._step(pattern)), slice(start + self._step(pattern), None)
            errors = _prune_block(weight[:, block], factor[block, block], sparsity, pattern)
            weight[:, rest].addmm_(errors.T, factor[block, rest], alpha=-1)
        return weight

    def _step(self, pattern: Pattern | None) -> int:
        """The block size, cut to whole N:M groups."""
        return max(self.block_size // pattern.group, 1) * pattern.group if pattern else self.block_size


def inverse_factor(gram: Float[Tensor, "n n"], damping: float) -> Float[Tensor, "n n"]:
    """The upper U with UᵀU = H⁻¹, H being `gram` with a damped diagonal.

    This is the paper's Cholesky factor of the inverse, found with one factorisation: with rows and columns reversed,
    H = RRᵀ for an upper R, and U = R⁻¹. No inverse is formed, which is more accurate in float32.
    """
    diagonal = gram.diagonal()
    hessian = gram.clone()
    hessian.diagonal().add_(damping * diagonal.mean()).masked_fill_(
        diagonal == 0, 1
    )  # no input ever arrives here, so any value will do
    lower, failed = torch.linalg.cholesky_ex(hessian.flip(0, 1))
    if failed:
        raise UserError(f"the Hessian is not positive definite with damping {damping}; take a larger one")
    identity = torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
    return torch.linalg.solve_triangular(lower, identity, upper=False).flip(0, 1)


def _prune_block(
    weight: Float[Tensor, "rows block"],
    factor: Float[Tensor, "block block"],
    sparsity: float,
    pattern: Pattern | None,
) -> Float[Tensor, "block rows"]:
    """Prune a block of columns in place; return each column's error over its diagonal entry of the factor.

    Updates reach the next few columns at once and the rest of the block in one product. The sums are the same.
    """
    columns = weight.T.contiguous()  # every step below then works on contiguous rows
    errors = torch.zeros_like(columns)
    diagonal = factor.diagonal()[:, None]
    mask = torch.zeros_like(columns, dtype=torch.bool)
    if not pattern:
        scores = (columns / diagonal).square()
        mask = lowest(scores.T.flatten(), int(scores.numel() * sparsity)).view_as(weight).T.contiguous()
    step = pattern.group if pattern else STEP
    for start in range(0, len(columns), step):
        group = slice(start, start + step)
        columns[group].addmm_(factor[:start, group].T, errors[:start], alpha=-1)
        if pattern:
            scores = (columns[group] / diagonal[group]).square()
            mask[group] = lowest(scores.T, pattern.group - pattern.kept).T
        for i in range(start, min(start + step, len(columns))):
            torch.where(mask[i], columns[i] / diagonal[i], errors[i], out=errors[i])
            columns[i + 1 : group.stop].addr_(factor[i, i + 1 : group.stop], errors[i], alpha=-1)
    weight.copy_(columns.masked_fill_(mask, 0).T)
    return errors

"""The column loop of GPTQ: Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained
Transformers", ICLR 2023, algorithm 1. GPTQ and SpQR differ in what they make of a group of columns.
"""

from typing import Protocol

import torch
from jaxtyping import Float
from torch import Tensor

from toolkit.errors import UserError


class Grid(Protocol):
    """The values that a group of columns may take, chosen group by group from left to right."""

    def fit(self, start: int, weight: Float[Tensor, "rows group"], diagonal: Float[Tensor, " group"]) -> None:
        """Choose the values of the group that starts at this column; `diagonal` is that of the factor."""
        ...

    def round(self, column: int, values: Float[Tensor, " rows"]) -> Float[Tensor, " rows"]:
        """Keep a column of the group that was fitted last, and return what it became."""
        ...


def quantise_columns(
    weight: Float[Tensor, "rows columns"],
    factor: Float[Tensor, "columns columns"],
    grid: Grid,
    group: int,
    block_size: int,
) -> None:
    """Round a matrix column by column; the columns behind take up each error, in place.

    `factor` is what `toolkit.quantization.hessian.damped_factor` gives. A group is fitted when it has taken up all
    errors before it. Columns beyond a block of `block_size`, a multiple of `group`, take them up block by block.
    """
    for start in range(0, weight.shape[1], block_size):
        block, rest = slice(start, start + block_size), slice(start + block_size, None)
        errors = _quantise_block(start, weight[:, block].T.contiguous(), factor[block, block], grid, group)
        weight[:, rest].addmm_(errors.T, factor[block, rest], alpha=-1)


def _quantise_block(start: int, columns: Tensor, factor: Tensor, grid: Grid, group: int) -> Float[Tensor, "block rows"]:
    """Each column's error over its diagonal entry of the factor. `columns` [block, rows] are changed."""
    errors, diagonal = torch.zeros_like(columns), factor.diagonal()
    for first in range(0, len(columns), group):
        part = slice(first, first + group)
        columns[part].addmm_(factor[:first, part].T, errors[:first], alpha=-1)
        grid.fit(start + first, columns[part].T, diagonal[part])
        for i in range(first, min(first + group, len(columns))):
            errors[i] = (columns[i] - grid.round(start + i, columns[i])) / diagonal[i]
            columns[i + 1 : part.stop].addr_(factor[i, i + 1 : part.stop], errors[i], alpha=-1)
    return errors


def check_range(weight: Tensor) -> None:
    """Raise `UserError` for a weight that is not finite or too large for fp16."""
    if weight.numel() and not bool((weight.abs() <= torch.finfo(torch.float16).max).all()):
        raise UserError("cannot quantise a weight that is not finite or too large for fp16; load the model anew")

"""GPTQ: Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers", ICLR 2023.
Columns are rounded in order, and later columns compensate for each error.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from toolkit.errors import UserError
from toolkit.quantization.groups import Groups, check_grid, check_range, encode, levels, pack
from toolkit.sparsity.hessian import compensated, factorised, one_by_one


@dataclass(frozen=True)
class GPTQ:
    """The quantiser's settings: bits of a code, inputs of a row that share a scale and a zero point, and SparseGPT's.

    `damping` is added to the Hessian's diagonal as a share of its mean. With `reorder`, columns are taken by falling
    diagonal of the Hessian (the release's `act_order`), and groups are of columns in that order.
    """

    bits: int = 3
    group: int = 64
    damping: float = 0.01
    reorder: bool = False
    block_size: int = 128
    statistic: ClassVar[str] = "gram"
    makes: ClassVar[type] = Groups

    def __post_init__(self):
        """Refuse settings that no matrix can meet. Raises `UserError`."""
        check_grid(self.bits, self.group)
        if self.block_size % self.group:
            raise UserError(f"block_size is {self.block_size}; expected a multiple of the group, {self.group}")

    def __call__(self, weight: Float[Tensor, "rows columns"], gram: Float[Tensor, "columns columns"]) -> Groups:
        """Quantise a float32 matrix; `gram` = XᵀX stands for the Hessian 2XᵀX/n, as in `toolkit.sparsity.sparsegpt`.

        Raises `UserError` for a weight that fp16 cannot hold, and as `factorised` does.
        """
        check_range(weight)
        factor = factorised(gram, self.damping, self.reorder)
        columns = weight.masked_fill(gram.diagonal() == 0, 0).T
        columns = columns.contiguous() if factor.order is None else columns[factor.order]
        codes = torch.zeros_like(columns, dtype=torch.uint8)
        steps: list[tuple[Tensor, Tensor]] = []  # scales and zero points [rows, 1] of the groups so far

        def choose(block: slice, wanted: Tensor, inverse: Tensor) -> None:
            def fit(group: slice) -> None:
                steps.append(levels(wanted[group].T, self.bits))

            def change(column: int) -> Tensor:
                scale, zero = steps[-1]
                code = encode(wanted[column][:, None], scale, zero, self.bits)
                codes[block][column] = code[:, 0]
                return ((code - zero.to(wanted.dtype)) * scale.to(wanted.dtype))[:, 0]

            one_by_one(wanted, inverse, self.group, fit, change)

        compensated(columns, factor, self.block_size, choose)
        order = None if factor.order is None else factor.order.to(torch.int32)
        scales, zeros = (torch.cat(parts, 1) for parts in zip(*steps, strict=True))
        packed = pack(codes.T, self.bits)
        return Groups(tuple(weight.shape), self.bits, self.group, packed, scales, zeros, order)

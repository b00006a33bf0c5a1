"""GPTQ: Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers",
ICLR 2023. Columns are rounded in order, and the columns behind take up each error.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float, Float16, UInt8
from torch import Tensor

from toolkit.errors import UserError
from toolkit.quantization.columns import check_range, quantise_columns
from toolkit.quantization.groups import Groups, check_grid, encode, levels, pack
from toolkit.quantization.hessian import damped_factor


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
    makes: ClassVar[type] = Groups

    def __post_init__(self):
        """Refuse settings that no matrix can meet. Raises `UserError`."""
        check_grid(self.bits, self.group)
        if self.block_size % self.group:
            raise UserError(f"block_size is {self.block_size}; expected a multiple of the group, {self.group}")

    def __call__(self, weight: Float[Tensor, "rows columns"], gram: Float[Tensor, "columns columns"]) -> Groups:
        """Quantise a float32 matrix; `gram` = XᵀX stands for the Hessian 2XᵀX/n, as in `toolkit.pruning.sparsegpt`.

        Damping is raised where it is not enough (`damped_factor`). Raises `UserError` for a weight that fp16 cannot
        hold, for statistics that are not finite, or if no damping helps.
        """
        check_range(weight)
        order = gram.diagonal().argsort(descending=True, stable=True) if self.reorder else None
        if order is not None:
            weight, gram = weight[:, order], gram[order][:, order]
        factor = damped_factor(gram, self.damping)
        grid = _Grid.start(weight.shape, self.bits, self.group)
        quantise_columns(weight.masked_fill(gram.diagonal() == 0, 0), factor, grid, self.group, self.block_size)
        return grid.finish(order)


@dataclass(eq=False)
class _Grid:
    """Codes, and scales and zero points of the groups so far (a `toolkit.quantization.columns.Grid`)."""

    bits: int
    group: int
    codes: UInt8[Tensor, "rows columns"]
    scales: list[Float16[Tensor, "rows 1"]]
    zeros: list[Float16[Tensor, "rows 1"]]

    @classmethod
    def start(cls, shape: tuple[int, int], bits: int, group: int) -> "_Grid":
        return cls(bits, group, torch.zeros(shape, dtype=torch.uint8), [], [])

    def fit(self, start: int, weight: Tensor, diagonal: Tensor) -> None:
        """Take the steps between the least and the greatest weight of each row."""
        del start, diagonal
        scale, zero = levels(weight, self.bits)
        self.scales.append(scale)
        self.zeros.append(zero)

    def round(self, column: int, values: Tensor) -> Tensor:
        """Keep the nearest codes; return what they stand for."""
        scale, zero = self.scales[-1], self.zeros[-1]
        codes = encode(values[:, None], scale, zero, self.bits)
        self.codes[:, column] = codes[:, 0]
        return ((codes - zero.to(values.dtype)) * scale.to(values.dtype))[:, 0]

    def finish(self, order: Tensor | None) -> Groups:
        """The matrix on its grid."""
        scales, zeros = torch.cat(self.scales, 1), torch.cat(self.zeros, 1)
        order = None if order is None else order.to(torch.int32)
        shape = tuple(self.codes.shape)
        return Groups(shape, self.bits, self.group, pack(self.codes, self.bits), scales, zeros, order)

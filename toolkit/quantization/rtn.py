"""Round to nearest: the baseline without data of Frantar et al., "GPTQ", ICLR 2023."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from toolkit.quantization.groups import Groups, check_grid, check_range, encode, levels, pack


@dataclass(frozen=True)
class RoundToNearest:
    """Each weight becomes the nearest of 2^bits even steps from the least to the greatest weight of its group."""

    bits: int = 4
    group: int = 64
    statistic: ClassVar[None] = None
    makes: ClassVar[type] = Groups

    def __post_init__(self):
        """Refuse settings that no matrix can meet. Raises `UserError`."""
        check_grid(self.bits, self.group)

    def __call__(self, weight: Float[Tensor, "rows columns"], gram: Tensor | None = None) -> Groups:
        """Quantise a matrix; `gram` is not looked at. Raises `UserError` for a weight that fp16 cannot hold."""
        del gram  # the signature of calibrated methods
        check_range(weight)
        codes, scales, zeros = [], [], []
        for part in weight.float().split(self.group, dim=1):
            scale, zero = levels(part, self.bits)
            codes.append(encode(part, scale, zero, self.bits))
            scales.append(scale)
            zeros.append(zero)
        packed = pack(torch.cat(codes, 1), self.bits)
        return Groups(tuple(weight.shape), self.bits, self.group, packed, torch.cat(scales, 1), torch.cat(zeros, 1))

"""Half-quadratic quantisation: Badri and Shaji, "Half-Quadratic Quantization of Large Machine Learning Models", 2023.

The package `hqq` chooses the integers, scales and zero points, without data. This module keeps what it chose.
"""

from dataclasses import dataclass
from typing import Any, Self

import torch
from jaxtyping import Float
from torch import Tensor

from toolkit.errors import UserError, unknown
from toolkit.extras import extra

BITS = (2, 3, 4, 8)
GROUP = 64  # divides the columns of every model at hand; 128 does not divide SmolLM2's 576


@dataclass(frozen=True, eq=False)
class Groupwise:
    """Weights in few bits: groups of consecutive inputs of a row share a scale and a zero point in 16 bits each.

    The packing is the package's own: 4 bits are packed without loss of space, 3 bits take 3.2 (ten in an int32).
    """

    shape: tuple[int, int]
    values: Tensor  # packed integers, uint8 or int32
    scales: Float[Tensor, "groups 1"]
    zeros: Float[Tensor, "groups 1"]
    layout: dict[str, Any]  # what the package needs to unpack the values

    @classmethod
    def encode(cls, weight: Float[Tensor, "rows columns"], bits: int = 4, group: int = GROUP) -> Self:
        """Quantise a matrix with `hqq`'s defaults (20 half-quadratic steps, groups along the inputs).

        Raises `UserError` for a number of bits outside `BITS`, a group that does not divide the columns, a weight that
        is not finite, or one with so few groups that its last byte would not be full (the package would lose it).
        """
        if bits not in BITS:
            raise unknown("number of bits", bits, BITS)
        if weight.shape[1] % group:
            raise UserError(f"groups of {group} do not divide {weight.shape[1]} columns; choose a divisor of them")
        if bits != 3 and (weight.numel() // group * bits) % 8:
            raise UserError(f"{weight.numel() // group} groups of {bits} bits do not fill whole bytes; choose 8 bits")
        if not weight.isfinite().all():
            raise UserError("cannot quantise a weight that is not finite; load the model anew")
        with extra("lab"):
            from hqq.core.quantize import Quantizer

        device = str(weight.device)
        values, layout = Quantizer.quantize(weight, bits, group_size=group, axis=1, device=device)
        scales, zeros = (layout.pop(name).to(torch.float16) for name in ("scale", "zero"))
        return cls(tuple(weight.shape), values, scales, zeros, layout)

    @property
    def nbytes(self) -> int:
        """Bytes of packed integers, scales and zero points."""
        return self.values.nbytes + self.scales.nbytes + self.zeros.nbytes

    def decode(self) -> Float[Tensor, "rows columns"]:
        """The dense weight, (integer − zero) · scale, float32."""
        with extra("lab"):
            from hqq.core.quantize import Quantizer

        layout = self.layout | {"scale": self.scales.float(), "zero": self.zeros.float()}
        return Quantizer.dequantize(self.values, layout)

"""int8 weights: a packed matrix of integers and the scales of its rows."""

from dataclasses import dataclass
from typing import Self

import torch
from jaxtyping import Float
from torch import Tensor

from toolkit.errors import UserError
from toolkit.formats import encode
from toolkit.formats.packed import Packed
from toolkit.quantization.absmax import absmax_int8, dequantise, row_scales

SCALES = "row_scales"  # what the scales are called where they are stored


@dataclass(frozen=True, eq=False)
class Scaled:
    """An int8 matrix in any format, each row of which is worth `scales` times its integers.

    It goes where a `Packed` goes, to be unpacked or multiplied. Not a format itself, since any format can be inside;
    a store keeps the scales as extras of the packed integers. Raises `ValueError` for parts that do not fit.
    """

    packed: Packed
    scales: Float[Tensor, " rows"]

    def __post_init__(self):
        """Refuse what is no int8 matrix with a scale a row."""
        if self.packed.dtype != torch.int8 or not self.scales.is_floating_point():
            raise ValueError(f"{self.packed.dtype} values with {self.scales.dtype} scales; expected int8 and a float")
        if tuple(self.scales.shape) != (self.packed.shape[0],):
            raise ValueError(f"scales of shape {list(self.scales.shape)} for {self.packed.shape[0]} rows")

    @classmethod
    def encode(cls, form: str, weight: Float[Tensor, "rows columns"]) -> Self:
        """Quantise a weight by its rows' largest magnitudes, and pack the integers. Raises `UserError` as `encode`."""
        if not weight.is_floating_point():
            raise UserError(f"cannot quantise a weight of {weight.dtype}; expected float32, float16 or bfloat16")
        scales = row_scales(weight)
        return cls(encode(form, absmax_int8(weight, scales)), scales.cpu())

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        return self.packed.shape

    @property
    def dtype(self) -> torch.dtype:
        """The type of the weight that the integers stand for."""
        return self.scales.dtype

    @property
    def nbytes(self) -> int:
        """Of the packed integers and the scales."""
        return self.packed.nbytes + self.scales.nbytes

    def decode(self) -> Tensor:
        """The weight itself, dense."""
        return dequantise(self.packed.decode(), self.scales)

"""The matrix as it is: what the others are compared with."""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from toolkit.formats.packed import Packed, expect


@dataclass(frozen=True, eq=False)
class Dense(Packed):
    """Every element, −0.0 included."""

    name = "dense"

    shape: tuple[int, int]
    values: Tensor  # [rows, columns]

    @property
    def dtype(self) -> torch.dtype:
        """The type of the elements."""
        return self.values.dtype

    @classmethod
    def encode(cls, weight: Tensor) -> Self:
        """Keep a copy of the matrix."""
        return cls(tuple(weight.shape), weight.clone())

    def decode(self) -> Tensor:
        """A copy of the matrix."""
        return self.values.clone()

    def check(self) -> None:
        """The values have the shape that the header tells."""
        expect("values", self.values, self.dtype, self.shape)

    @classmethod
    def expected_nbytes(cls, shape: tuple[int, int], sparsity: float, dtype: torch.dtype) -> int:
        """All elements, whatever the sparsity."""
        return shape[0] * shape[1] * dtype.itemsize

"""The dense matrix, which the other formats are compared with."""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from toolkit.formats.packed import Packed, dense_matvec, expect
from toolkit.kernels import dense
from toolkit.kernels.engine.parallel import Product


@dataclass(frozen=True, eq=False)
class Dense(Packed):
    """Every element; −0.0 stays −0.0."""

    name = "dense"
    is_dense = True
    has_matvec = True

    shape: tuple[int, int]
    values: Tensor  # [rows, columns]

    def __post_init__(self):
        """Raise `ValueError` for values of another shape."""
        expect("values", self.values, self.values.dtype, tuple(self.shape))

    @property
    def dtype(self) -> torch.dtype:
        """The type of the elements."""
        return self.values.dtype

    @classmethod
    def encode(cls, weight: Tensor) -> Self:
        """Keep a copy of the matrix."""
        return cls(tuple(weight.shape), weight.clone())

    def _fill(self, out: Tensor) -> None:
        out.copy_(self.values)

    def dense_in(self, scratch: Tensor) -> Tensor:
        """The stored values themselves; nothing is copied."""
        return self.values

    def matvec(self, x: Tensor) -> Tensor:
        """The product of the stored values and `x` [columns], as fp32 [rows]."""
        return dense_matvec(self.values, x)

    def product(self, x: Tensor, out: Tensor) -> Product | None:
        """The product with fp32 sums of the stored values, in another order than torch's."""
        return dense.product(self.values, x, out)

    def check(self) -> None:
        """Any values are good."""

    @classmethod
    def expected_nbytes(cls, shape: tuple[int, int], sparsity: float, dtype: torch.dtype) -> int:
        """All elements, whatever the sparsity."""
        return shape[0] * shape[1] * dtype.itemsize

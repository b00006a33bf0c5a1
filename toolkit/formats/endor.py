"""ENDOR: a bitmap and the non-zeros (ENDOR, section 4.1, figure 4)."""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from toolkit.formats.packed import Packed
from toolkit.kernels import bitmap
from toolkit.kernels.bitmap import Bitmap


@dataclass(frozen=True, eq=False)
class Endor(Bitmap, Packed):
    """One bit per element and the non-zeros; `toolkit.kernels.bitmap` decompresses it and multiplies with it.

    −0.0 decodes as +0.0. The paper stores rows × columns bits; starting each row on a 32-bit word and keeping its first
    value's place adds 8 bytes a row (and up to 31 bits), 0.02 % of a 9216 × 9216 fp16 matrix.

        [[1, 0, 0, 2],      bitmap       0b1001, 0b0000, 0b0010
         [0, 0, 0, 0],      row_offsets  0, 2, 2, 3
         [0, 3, 0, 0]]      values       1, 2, 3
    """

    name = "endor"

    @classmethod
    def encode(cls, weight: Tensor) -> Self:
        """Pack a matrix."""
        return cls(**vars(bitmap.encode(weight)))

    def decode(self) -> Tensor:
        """The dense matrix."""
        return bitmap.decompress(self)

    @classmethod
    def expected_nbytes(cls, shape: tuple[int, int], sparsity: float, dtype: torch.dtype) -> int:
        """Bitmap, row offsets and non-zeros."""
        rows, columns = shape
        non_zeros = round((1 - sparsity) * rows * columns)
        return rows * bitmap.row_bytes(columns) + 8 * (rows + 1) + non_zeros * dtype.itemsize

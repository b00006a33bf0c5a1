"""ENDOR: a bitmap and the non-zeros (ENDOR, section 4.1, figure 4)."""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from toolkit.formats.packed import Packed
from toolkit.kernels import bitmap
from toolkit.kernels.bitmap import Bitmap
from toolkit.kernels.bitmap.layout import block_count
from toolkit.kernels.engine.parallel import Product


@dataclass(frozen=True, eq=False)
class Endor(Bitmap, Packed):
    """One bit per element and the non-zeros; `toolkit.kernels.bitmap` decompresses it and multiplies with it.

    −0.0 decodes as +0.0. The paper stores rows × columns bits. Here each row starts on a 32-bit word. The place of its
    first value (8 bytes) is stored as well, and so is that of each of its blocks of 4096 columns (4 bytes), so that
    several warps of a GPU can share a row. This adds 0.2 % to a 9216 × 9216 fp16 matrix at 50 %. A GPU could count the
    blocks itself after each load, but it would need another kernel and memory for the counts.

        [[1, 0, 0, 2],      bitmap       0b1001, 0b0000, 0b0010
         [0, 0, 0, 0],      row_offsets  0, 2, 2, 3
         [0, 3, 0, 0]]      values       1, 2, 3
                            block_offsets  0 for each row: a single block
    """

    name = "endor"
    version = 2  # version 1 had no block offsets
    has_matvec = True
    has_batched_matvec = True

    @classmethod
    def encode(cls, weight: Tensor) -> Self:
        """Pack a matrix."""
        return cls(**vars(bitmap.encode(weight)))

    def _fill(self, out: Tensor) -> None:
        bitmap.decompress(self, out=out)

    def matvec(self, x: Tensor) -> Tensor:
        """The product with `x` [*batch, columns], read straight from the packed form, as fp32 [*batch, rows]."""
        return bitmap.matvec(self, x)

    def product(self, x: Tensor, out: Tensor) -> Product:
        """The same, to be run again and again."""
        return bitmap.product(self, x, out)

    @classmethod
    def expected_nbytes(cls, shape: tuple[int, int], sparsity: float, dtype: torch.dtype) -> int:
        """Bitmap, row and block offsets, and non-zeros."""
        rows, columns = shape
        non_zeros = round((1 - sparsity) * rows * columns)
        offsets = 8 * (rows + 1) + 4 * rows * block_count(columns)
        return rows * bitmap.row_bytes(columns) + offsets + non_zeros * dtype.itemsize

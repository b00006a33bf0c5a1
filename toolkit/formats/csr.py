"""Compressed sparse rows."""

from dataclasses import dataclass
from typing import Self

import torch
from jaxtyping import Int64
from torch import Tensor

from toolkit.formats.packed import Packed, bits, expect, expect_rising
from toolkit.kernels import bitmap

BLOCK = 512  # rows decoded at once; torch's 64-bit indices of a whole paper-scale matrix would take gigabytes


def index_dtype(columns: int) -> torch.dtype:
    """The narrowest type for column indices: uint16 up to 65,536 columns, else int32."""
    return torch.uint16 if columns <= 1 << 16 else torch.int32


@dataclass(frozen=True, eq=False)
class CSR(Packed):
    """The non-zeros and their columns, row by row, columns ascending. −0.0 decodes as +0.0.

    Column indices are as narrow as the number of columns allows, as ENDOR counts them (section 2.1: at 50 % and 16
    bits, the indices take as many bytes as the removed zeros did). SciPy and torch use int32 or int64.

        [[1, 0, 0, 2],      row_offsets  0, 2, 2, 3
         [0, 0, 0, 0],      columns      0, 3, 1
         [0, 3, 0, 0]]      values       1, 2, 3
    """

    name = "csr"

    shape: tuple[int, int]
    row_offsets: Int64[Tensor, " rows+1"]
    columns: Tensor  # [non_zeros] uint16 or int32
    values: Tensor  # [non_zeros]

    def __post_init__(self):
        """Raise `ValueError` for tensors of types or shapes that do not fit."""
        count = self.values.numel()
        expect("row_offsets", self.row_offsets, torch.int64, (self.shape[0] + 1,))
        expect("columns", self.columns, index_dtype(self.shape[1]), (count,))
        expect("values", self.values, self.values.dtype, (count,))

    @property
    def dtype(self) -> torch.dtype:
        """The type of the elements."""
        return self.values.dtype

    @classmethod
    def encode(cls, weight: Tensor) -> Self:
        """Pack a matrix."""
        packed = bitmap.encode(weight)
        columns = bitmap.columns(packed, index_dtype(weight.shape[1]))
        return cls(packed.shape, packed.row_offsets, columns, packed.values)

    def _fill(self, out: Tensor) -> None:
        """Raises `ValueError` for row offsets that do not rise; torch refuses a column outside."""
        self._check_offsets()
        values, dense = bits(self.values), bits(out).zero_()
        for first in range(0, self.shape[0], BLOCK):
            block = dense[first : first + BLOCK]
            offsets = self.row_offsets[first : first + BLOCK + 1]
            rows = torch.arange(len(block)).repeat_interleave(offsets.diff())
            span = slice(int(offsets[0]), int(offsets[-1]))
            block[rows, self.columns[span].to(torch.int64)] = values[span]

    def check(self) -> None:
        """Offsets rise from zero to the number of values; columns rise within each row and lie in the matrix."""
        self._check_offsets()
        columns, count = self.shape[1], self.values.numel()
        indices = self.columns.numpy()
        if count and not 0 <= indices.min() <= indices.max() < columns:
            raise ValueError(f"a column index lies outside 0 to {columns - 1}")
        rising = indices[1:] > indices[:-1]
        starts = self.row_offsets[1:-1].numpy()
        rising[starts[(starts > 0) & (starts < count)] - 1] = True  # a row's first column may be lower
        if not rising.all():
            raise ValueError("column indices do not rise within a row")

    def _check_offsets(self) -> None:
        expect_rising("row offsets", self.row_offsets, self.values.numel(), "the number of values")

    @classmethod
    def expected_nbytes(cls, shape: tuple[int, int], sparsity: float, dtype: torch.dtype) -> int:
        """Row offsets, column indices and non-zeros."""
        rows, columns = shape
        non_zeros = round((1 - sparsity) * rows * columns)
        return 8 * (rows + 1) + non_zeros * (index_dtype(columns).itemsize + dtype.itemsize)

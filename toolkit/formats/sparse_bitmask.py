"""The `sparse-bitmask` layout of compressed-tensors 0.9 to 0.14: the contents of `endor` in other tensors.

    [[1, 0, 0, 2],      shape        3, 4
     [0, 0, 0, 0],      bitmask      0b1001, 0b0000, 0b0010   (lowest bit = first column; rows padded to 8 bits)
     [0, 3, 0, 0]]      row_offsets  0, 2, 2
                        compressed   1, 2, 3

The bits are the same, but rows end on a byte instead of a 32-bit word, and the last offset, which is the number of
values, is not stored. (Source: `compressors/sparse_compressors/sparse_bitmask.py` of compressed-tensors 0.14.0.1.)
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import torch
from jaxtyping import Int64, UInt8
from torch import Tensor
from torch.nn import functional

from toolkit.errors import UserError
from toolkit.formats.endor import Endor
from toolkit.formats.packed import DTYPES, as_matrix, check_sizes, expect
from toolkit.kernels.bitmap.layout import block_counts, row_bytes, starts

PARTS = ("shape", "compressed", "bitmask", "row_offsets")
# types of one byte, which the kernels treat as int8
BYTES = {str(t).removeprefix("torch."): t for t in (torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2)}
MINUS_ZERO = -128  # of both float8 types, read as int8


@dataclass(frozen=True, eq=False)
class SparseBitmask:
    """A matrix or a vector as the four tensors that a checkpoint holds. A vector counts as one row.

    Elements are float32, float16, bfloat16, int8, uint8, float8_e4m3fn or float8_e5m2. As in compressed-tensors, −0.0
    counts as zero and decodes as +0.0, and NaN and infinities are non-zeros.
    """

    shape: tuple[int, ...]
    compressed: Tensor  # [non_zeros], row-major
    bitmask: UInt8[Tensor, "*rows row_bytes"]  # row_bytes = ⌈columns / 8⌉; bit k of byte j is column 8j + k
    row_offsets: Int64[Tensor, "*rows"]  # values before each row

    @classmethod
    def encode(cls, weight: Tensor) -> Self:
        """Pack a matrix or a vector. Raises `UserError` for other dimensions or elements of another type."""
        if not isinstance(weight, Tensor) or weight.ndim not in (1, 2):
            kind = f"tensor of shape {list(weight.shape)}" if isinstance(weight, Tensor) else type(weight).__name__
            raise UserError(f"cannot pack a {kind} as sparse-bitmask; expected a tensor of 1 or 2 dimensions")
        return cls._from_endor(Endor.encode(_carried(weight)), tuple(weight.shape), weight.dtype)

    @classmethod
    def from_endor(cls, packed: Endor) -> Self:
        """The same matrix. It shares memory with `packed` if rows are whole 32-bit words."""
        return cls._from_endor(packed, packed.shape, packed.dtype)

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> Self:
        """Make a matrix of the four `PARTS`. Raises `ValueError` unless they agree, which takes reading the bitmask."""
        expect("shape", tensors["shape"], torch.int64, (tensors["shape"].numel(),))
        found = cls(tuple(tensors["shape"].tolist()), *(tensors[part].contiguous() for part in PARTS[1:]))
        found.check()
        return found

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The four `PARTS`, as a checkpoint stores them."""
        return {"shape": torch.tensor(self.shape), **{part: getattr(self, part) for part in PARTS[1:]}}

    @property
    def nbytes(self) -> int:
        """Bytes of all four tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def check(self) -> None:
        """Raise `ValueError` unless the tensors agree with each other and with the shape."""
        if len(self.shape) not in (1, 2):
            raise ValueError(f"shape is {list(self.shape)}; expected 1 or 2 sizes")
        check_sizes(self.shape)
        *rows, columns = self.shape
        if self.compressed.dtype not in (*DTYPES.values(), *BYTES.values()):
            raise ValueError(f"compressed is {self.compressed.dtype}; expected one of {', '.join([*DTYPES, *BYTES])}")
        expect("compressed", self.compressed, self.compressed.dtype, (self.compressed.numel(),))
        expect("bitmask", self.bitmask, torch.uint8, (*rows, _bytes(columns)))
        expect("row_offsets", self.row_offsets, torch.int64, tuple(rows))
        self._to_endor().check()

    def decode(self) -> Tensor:
        """The dense tensor."""
        return self._to_endor().decode().view(self.compressed.dtype).view(self.shape)

    def to_endor(self) -> Endor:
        """The same matrix in the format `endor`; a vector becomes one row.

        Bitmap and values are shared if rows are whole 32-bit words. Raises `UserError` for elements of a type that
        `endor` does not hold.
        """
        if self.compressed.dtype not in DTYPES.values():
            raise UserError(f"format 'endor' holds no {self.compressed.dtype}; expected one of {', '.join(DTYPES)}")
        return self._to_endor()

    @classmethod
    def _from_endor(cls, packed: Endor, shape: tuple[int, ...], dtype: torch.dtype) -> Self:
        *rows, columns = shape
        bitmask = packed.bitmap[:, : _bytes(columns)].contiguous().view(*rows, _bytes(columns))
        return cls(shape, packed.values.view(dtype), bitmask, packed.row_offsets[:-1].view(rows))

    def _to_endor(self) -> Endor:
        rows, columns = self.row_offsets.numel(), self.shape[-1]
        bitmap = self.bitmask.view(rows, _bytes(columns))
        if padding := row_bytes(columns) - _bytes(columns):
            bitmap = functional.pad(bitmap, (0, padding))
        values = self.compressed.view(torch.int8) if self.compressed.dtype in BYTES.values() else self.compressed
        return _endor((rows, columns), bitmap, self.row_offsets.flatten(), values)


def _endor(shape: tuple[int, int], bitmap: Tensor, row_starts: Tensor, values: Tensor) -> Endor:
    """Make an `Endor` of its parts; the block offsets are counted."""
    row_offsets = torch.cat([row_starts, torch.tensor([values.numel()])])
    counts = block_counts(bitmap, shape[1])
    block_offsets = torch.empty(counts.shape, dtype=torch.int32).copy_(torch.from_numpy(starts(counts)))
    return Endor(shape, bitmap, row_offsets, block_offsets, values)


def _bytes(columns: int) -> int:
    return -(-columns // 8)


def _carried(weight: Tensor) -> Tensor:
    """The weight as a matrix of a type that the kernels can pack."""
    matrix = weight[None] if weight.ndim == 1 else weight
    if weight.dtype not in BYTES.values():
        return as_matrix(matrix)
    carried = as_matrix(matrix.detach().contiguous().view(torch.int8))
    return carried.masked_fill(carried == MINUS_ZERO, 0) if weight.is_floating_point() else carried

"""Matrices in the block types of ggml, as a GGUF file holds them: its own bytes, neither copied nor repacked.

They come from a file and nothing packs them, so they stand in a registry of their own, `TYPES`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from jaxtyping import UInt8
from torch import Tensor

from toolkit.errors import UserError
from toolkit.formats.packed import Packed, expect
from toolkit.kernels.blocks import LAYOUTS, BlockLayout, tensors
from toolkit.kernels.engine.parallel import Product


@dataclass(frozen=True, eq=False)
class BlockMatrix(Packed):
    """A matrix of one block type. `name` is GGUF's name of the type.

    `data` holds the rows of the file; it may be a view of any buffer. `dtype` is the type that it decodes to: weights
    are computed in fp32 and rounded to it once.

    Raises `ValueError` for columns that do not fill whole blocks, for data that do not fit the shape, and for a type of
    integers.
    """

    has_matvec = True
    has_batched_matvec = True
    multiplied_packed = True
    layout: ClassVar[BlockLayout]

    shape: tuple[int, int]
    data: UInt8[Tensor, "rows bytes"]
    dtype: torch.dtype = torch.float32

    def __post_init__(self):
        """Refuse data of another type and shape."""
        if not self.dtype.is_floating_point:
            raise ValueError(f"{self.name} stands for floating-point weights; the header says {self.dtype}")
        rows, columns = self.shape
        expect("data", self.data, torch.uint8, (rows, self.layout.row_bytes(columns)))
        if not self.data.is_contiguous():
            raise ValueError("data is not contiguous")

    @classmethod
    def encode(cls, weight: Tensor) -> Self:
        """Blocks come from GGUF files alone: raises `UserError`."""
        raise UserError(f"the toolkit does not pack to {cls.name}: make such a file with llama.cpp's llama-quantize")

    @classmethod
    def expected_nbytes(cls, shape: tuple[int, int], sparsity: float, dtype: torch.dtype) -> int:
        """Bytes of all blocks, whatever the sparsity and the type. Raises `ValueError` as the class does."""
        return shape[0] * cls.layout.row_bytes(shape[1])

    def check(self) -> None:
        """Any bytes are blocks: scales that are not finite give weights that are not."""

    def pieces(self, nbytes: int) -> Sequence[Packed]:
        """Some rows at a time, at least one."""
        rows, columns = self.shape
        step = max(1, nbytes // max(1, columns * self.dtype.itemsize))
        if step >= rows:
            return (self,)
        spans = [slice(first, min(first + step, rows)) for first in range(0, rows, step)]
        return [type(self)((span.stop - span.start, columns), self.data[span], self.dtype) for span in spans]

    def _fill(self, out: Tensor) -> None:
        tensors.decode(self.name, self.data, out)

    def matvec(self, x: Tensor) -> Tensor:
        """The matrix times `x` [*batch, columns], fp32, as `toolkit.kernels.blocks.tensors` has it."""
        return tensors.matvec(self.name, self.data, x)

    def product(self, x: Tensor, out: Tensor) -> Product:
        """The same, to be run again and again."""
        return tensors.product(self.name, self.data, x, out)


TYPES: dict[str, type[BlockMatrix]] = {
    name: type(name, (BlockMatrix,), {"name": name, "layout": layout, "__doc__": f"A matrix of {name} blocks."})
    for name, layout in LAYOUTS.items()
}

"""Linears whose weights are matrices of a GGUF file, as packed weights of torch's tensors."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Int64

from toolkit.formats import Packed
from toolkit.formats.ggml import TYPES
from toolkit.formats.parted import Parted
from toolkit.storage.runs import Buffer
from toolkit.storage.tensor_ranges import TensorRange

PIECE_BYTES = 8 << 20  # of a weight that are dense at a time


@dataclass(frozen=True)
class FileOp:
    """A linear whose rows are those of one range or of several; see `Parted` for `source`.

    `dtype` is that of the weight when it is made dense.
    """

    layer: int
    op: str
    dtype: torch.dtype
    parts: tuple[TensorRange, ...]
    source: Int64[np.ndarray, " rows"] | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        return sum(part.shape[0] for part in self.parts), self.parts[0].shape[1]

    @property
    def label(self) -> str:
        """A name for people."""
        return f"layer {self.layer} {self.op}"

    @property
    def scales_dtype(self) -> None:
        """No integers with scales beside them."""
        return

    @property
    def dense_bytes(self) -> int:
        """Bytes of the matrix when dense."""
        return self.shape[0] * self.shape[1] * self.dtype.itemsize

    @property
    def scratch_bytes(self) -> int:
        """Bytes in which prompts make it dense, some rows at a time: at least one."""
        return min(self.dense_bytes, max(PIECE_BYTES, self.shape[1] * self.dtype.itemsize))

    def view(self, data: Callable[[TensorRange], Buffer]) -> Packed:
        """The weight, in place: `data` gives the bytes from the first one of a range on."""
        parts = tuple(packed(part, data(part), self.dtype) for part in self.parts)
        return Parted(parts, self.source) if parts[1:] or self.source is not None else parts[0]


def packed(part: TensorRange, data: Buffer, dtype: torch.dtype) -> Packed:
    """The matrix of a range, in place, which decodes to `dtype`: `data` starts with its first byte."""
    data = torch.from_numpy(data) if isinstance(data, np.ndarray) else data
    return TYPES[part.kind](part.shape, data[: part.nbytes].view(part.shape[0], -1), dtype)

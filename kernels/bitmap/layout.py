"""The parts of a bitmap-packed matrix, and the conditions under which a kernel may read it."""

import dataclasses
from dataclasses import dataclass
from functools import cached_property
from typing import Self

import numpy as np
import torch
from jaxtyping import Int32, Int64, UInt8
from torch import Tensor

from toolkit.kernels.bitmap.shared import BLOCK, WORD
from toolkit.kernels.engine.tensors import BITS, expect


@dataclass(frozen=True, eq=False)
class Bitmap:
    """A matrix as bitmap and non-zeros, all tensors on one device: the CPU or a CUDA GPU.

    ENDOR's bitmap is one vector of rows × columns bits. Here each row starts a new 32-bit word, and the number of
    values before the row is stored, so that rows decode independently. A row is also cut into blocks of 4096 columns.
    The number of values before each block is stored too, so that several warps of a GPU can share a row.
    """

    shape: tuple[int, int]
    bitmap: UInt8[Tensor, "rows row_bytes"]  # row_bytes = 4·⌈columns / 32⌉; bit k of byte j is column 8j + k
    row_offsets: Int64[Tensor, " rows+1"]
    block_offsets: Int32[Tensor, "rows blocks"]  # values of the row before each of its ⌈columns / 4096⌉ blocks
    values: Tensor  # [non_zeros], row-major

    def __post_init__(self):
        """Raise `ValueError` for tensors that do not fit the shape, before a kernel reads beyond them.

        The last offsets are checked on the CPU only, since reading them from a GPU would wait for all its work. Tensors
        on the device "meta" stand for some that are not read yet.
        """
        rows, columns = self.shape
        expect("bitmap", self.bitmap, torch.uint8, (rows, row_bytes(columns)), self.device)
        expect("row_offsets", self.row_offsets, torch.int64, (rows + 1,), self.device)
        expect("block_offsets", self.block_offsets, torch.int32, (rows, block_count(columns)), self.device)
        expect("values", self.values, self.values.dtype, (self.values.numel(),), self.device)
        if self.device.type not in ("cpu", "cuda", "meta"):
            raise ValueError(f"values are on {self.device}; expected the CPU or a CUDA GPU")
        if self.values.dtype not in BITS:
            raise ValueError(f"values are {self.values.dtype}; expected one of {_names(BITS)}")
        if self.device.type == "cpu" and (
            int(self.row_offsets[0]) != 0 or int(self.row_offsets[-1]) != self.values.numel()
        ):
            raise ValueError(f"row offsets do not run from 0 to the number of values, {self.values.numel()}")

    @property
    def dtype(self) -> torch.dtype:
        """The type of the elements: float32, float16, bfloat16 or int8."""
        return self.values.dtype

    @property
    def device(self) -> torch.device:
        """The device of the tensors."""
        return self.values.device

    @cached_property
    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The words of the bitmap, the row offsets and the bits of the values, as kernels of the CPU take them."""
        values = self.values.view(BITS[self.dtype]).numpy()
        return self.bitmap.numpy().view(np.uint32), self.row_offsets.numpy(), values

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Self:
        """The same matrix on another device. With `non_blocking`, copies from pinned memory are not awaited."""
        stored = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        moved = {
            name: value.to(device, non_blocking=non_blocking)
            for name, value in stored.items()
            if isinstance(value, Tensor)
        }
        return dataclasses.replace(self, **moved)

    def check(self) -> None:
        """Raise `ValueError` unless every row's bits and offsets agree; reads the whole bitmap, on the CPU."""
        here = self.to("cpu")
        counts = block_counts(here.bitmap, self.shape[1])
        totals, promised = counts.sum(axis=1), np.diff(here.row_offsets.numpy())
        if not np.array_equal(totals, promised):
            row = int(np.flatnonzero(totals != promised)[0])
            raise ValueError(f"row {row} has {totals[row]} bits set in the bitmap, but its offsets say otherwise")
        wrong = np.argwhere(starts(counts) != here.block_offsets.numpy())
        if len(wrong):
            raise ValueError(f"block {wrong[0][1]} of row {wrong[0][0]}: its offset is not the number of bits before")
        beyond, words = self.shape[1] % WORD, here.bitmap.numpy().view(np.uint32)
        if beyond and np.any(words[:, -1] >> np.uint32(beyond)):
            raise ValueError(f"the bitmap has bits set beyond column {self.shape[1]}")


def row_bytes(columns: int) -> int:
    """Bytes of one row of a bitmap: whole 32-bit words."""
    return -(-columns // WORD) * (WORD // 8)


def block_count(columns: int) -> int:
    """Blocks of one row."""
    return -(-columns // BLOCK)


def block_counts(bitmap: UInt8[Tensor, "rows row_bytes"], columns: int) -> Int64[np.ndarray, "rows blocks"]:
    """Values in each block of each row, counted in the bitmap."""
    words = bitmap.numpy().view(np.uint32)
    counts = np.zeros((len(words), block_count(columns)), np.int64)
    # block by block, since the counts of all words would take eight times the bitmap's memory
    for block in range(counts.shape[1] if counts.size else 0):
        first = block * BLOCK // WORD
        counts[:, block] = np.bitwise_count(words[:, first : first + BLOCK // WORD]).sum(axis=1, dtype=np.int64)
    return counts


def starts(counts: Int64[np.ndarray, "rows blocks"]) -> Int64[np.ndarray, "rows blocks"]:
    """Values of the row before each block."""
    return counts.cumsum(axis=1) - counts


def _names(dtypes) -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)

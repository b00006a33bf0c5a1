"""Sparse outliers: fp16 values beside their columns, by rows (CSR) or by blocks of 16 rows (PTCSR).

A word holds one outlier: the column in its low 16 bits and the fp16 value in its high 16 bits, as the library
spqr_quant stores them. A matrix of more than 65,536 columns has words of 64 bits: 32 bits of column, then the value.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Self

import numpy as np
import torch
from jaxtyping import Float16, Int32, Int64
from torch import Tensor

from toolkit.errors import UserError
from toolkit.kernels.csr.shared import BLOCK, NARROW_BITS, NARROW_COLUMNS, WIDE_BITS
from toolkit.kernels.engine.tensors import expect

CPU = torch.device("cpu")


@dataclass(frozen=True, eq=False)
class Outliers(ABC):
    """The outliers of a matrix [rows, columns]. At most 2³¹ − 1 words, since offsets are int32.

    On the CPU all methods work; on a GPU only products do, whose kernels bound all offsets themselves. Raises
    `ValueError` for tensors that do not fit the shape.
    """

    name: ClassVar[str]
    rows_at_once: ClassVar[int]  # the rows that two neighbouring offsets enclose

    shape: tuple[int, int]
    offsets: Int32[Tensor, " lines+1"]
    col_vals: Tensor  # [words] int32 or int64

    def __post_init__(self):
        """Refuse tensors of other types or sizes, before a kernel reads beyond them."""
        lines, device = -(-self.shape[0] // self.rows_at_once), self.offsets.device
        expect("offsets", self.offsets, torch.int32, (lines + 1,), device)
        expect("col_vals", self.col_vals, word_dtype(self.shape[1]), (self.col_vals.numel(),), device)
        if device != CPU:
            return
        if int(self.offsets[0]) != 0 or int(self.offsets[-1]) != self.col_vals.numel():
            raise ValueError(f"offsets do not run from 0 to the number of words, {self.col_vals.numel()}")

    @cached_property
    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """Offsets and unsigned words, as kernels of the CPU take them."""
        return self.offsets.numpy(), self.col_vals.numpy().view(f"u{self.col_vals.itemsize}")

    def to(self, device: torch.device | str) -> Self:
        """The same on another device."""
        return type(self)(self.shape, self.offsets.to(device), self.col_vals.to(device))

    @classmethod
    def encode(
        cls,
        shape: tuple[int, int],
        rows: Int64[Tensor, " count"],
        columns: Int64[Tensor, " count"],
        values: Float16[Tensor, " count"],
    ) -> Self:
        """Pack outliers, given in any order, at most one a place; zeros are dropped, since they add nothing.

        Raises `UserError` for more than 2³¹ − 1 words.
        """
        order = torch.from_numpy(np.lexsort((columns.numpy(), rows.numpy())))
        order = order[values[order] != 0]
        rows, columns, values = (part[order].numpy() for part in (rows, columns, values))
        words = columns.astype(np.uint64) | values.view(np.uint16).astype(np.uint64) << np.uint64(column_bits(shape[1]))
        offsets, words = cls._place(np.bincount(rows, minlength=shape[0]), rows, words)
        if offsets[-1] > torch.iinfo(torch.int32).max:
            raise UserError(f"{offsets[-1]} words of outliers are too many for 32-bit offsets; keep fewer outliers")
        col_vals = torch.empty(len(words), dtype=word_dtype(shape[1]))  # an empty array of NumPy's has strides of 0
        col_vals.numpy().view(f"u{col_vals.itemsize}")[:] = words
        return cls(shape, torch.from_numpy(offsets.astype(np.int32)), col_vals)

    @classmethod
    @abstractmethod
    def _place(cls, counts: np.ndarray, rows: np.ndarray, words: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The offsets, and the words of sorted outliers where they belong; `counts` are those of each row."""

    @abstractmethod
    def rows(self) -> Int64[Tensor, " words"]:
        """The row of each word. A block's padding may lie beyond the last row."""

    def columns(self) -> Int64[Tensor, " words"]:
        """The column of each word."""
        return torch.from_numpy((self._bits() & np.uint64((1 << column_bits(self.shape[1])) - 1)).astype(np.int64))

    def values(self) -> Float16[Tensor, " words"]:
        """The value of each word."""
        above = self._bits() >> np.uint64(column_bits(self.shape[1]))
        return torch.from_numpy(above.astype(np.uint16).view(np.float16))

    def entries(self) -> tuple[Int64[Tensor, " count"], Int64[Tensor, " count"], Float16[Tensor, " count"]]:
        """Rows, columns and values of all outliers, without padding, by row and column."""
        return self._entries(self._order())

    def _entries(self, order: Int64[Tensor, " count"]) -> tuple[Tensor, Tensor, Tensor]:
        return self.rows()[order], self.columns()[order], self.values()[order]

    def _order(self) -> Int64[Tensor, " count"]:
        """The places of all outliers among the words, by row and column."""
        outliers = self.col_vals != 0 if self.rows_at_once > 1 else torch.ones_like(self.col_vals, dtype=torch.bool)
        places = outliers.nonzero()[:, 0]
        keys = (self.rows() << WIDE_BITS | self.columns())[places]
        return places[torch.from_numpy(np.argsort(keys.numpy(), kind="stable"))]  # a pass, if they are in order

    def check(self) -> None:
        """Raise `ValueError` unless the words are as `encode` packs them: finite numbers, at most one per place."""
        if bool((self.offsets.diff() < 0).any()):
            raise ValueError("offsets fall")
        if np.any(self._bits() >> np.uint64(column_bits(self.shape[1]) + 16)):
            raise ValueError("a word has bits set above its value")
        order = self._order()
        rows, columns, values = self._entries(order)
        if not bool(((rows < self.shape[0]) & (columns < self.shape[1])).all()):
            raise ValueError(f"an outlier lies outside of the matrix, {self.shape[0]} x {self.shape[1]}")
        if not bool(values.isfinite().all()):
            raise ValueError("an outlier is not finite")
        counts, words = np.bincount(rows, minlength=self.shape[0]), self._bits()[order.numpy()]
        offsets, words = self._place(counts, rows.numpy(), words)
        twice = bool(((rows.diff() == 0) & (columns.diff() == 0)).any())
        if twice or not np.array_equal(offsets, self.offsets) or not np.array_equal(words, self._bits()):
            raise ValueError("columns do not rise within a row, or padding is not behind all outliers")

    def _bits(self) -> np.ndarray:
        return self.arrays[1].astype(np.uint64)


class CsrOutliers(Outliers):
    """Compressed sparse rows: those of row r are the words from `offsets[r]` up to `offsets[r + 1]`."""

    name = "csr"
    rows_at_once = 1

    @classmethod
    def _place(cls, counts: np.ndarray, rows: np.ndarray, words: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return np.concatenate([[0], counts.cumsum()]), words

    def rows(self) -> Int64[Tensor, " words"]:
        """The row of each word."""
        return torch.arange(self.shape[0]).repeat_interleave(self.offsets.diff())


class PtcsrOutliers(Outliers):
    """Padded, transposed CSR (thesis, section 3.4.3): sixteen rows are padded to the longest of them.

    Word k of row r of block b is `col_vals[offsets[b] + 16·k + r]`. Padding is 0: the value 0 in column 0.
    """

    name = "ptcsr"
    rows_at_once = BLOCK

    @classmethod
    def _place(cls, counts: np.ndarray, rows: np.ndarray, words: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        by_block = np.zeros((-(-len(counts) // BLOCK), BLOCK), np.int64)
        by_block.reshape(-1)[: len(counts)] = counts
        longest = by_block.max(axis=1, initial=0)
        offsets = np.concatenate([[0], BLOCK * longest.cumsum()])
        placed = np.zeros(offsets[-1], np.uint64)
        within = np.arange(len(rows)) - (counts.cumsum() - counts)[rows]
        placed[offsets[rows // BLOCK] + BLOCK * within + rows % BLOCK] = words
        return offsets, placed

    def rows(self) -> Int64[Tensor, " words"]:
        """The row of each word. Padding may lie beyond the last row."""
        blocks = torch.arange(len(self.offsets) - 1).repeat_interleave(self.offsets.diff())
        # blocks begin at multiples of 16
        return BLOCK * blocks + torch.arange(self.col_vals.numel()) % BLOCK


STORAGES: dict[str, type[Outliers]] = {cls.name: cls for cls in (CsrOutliers, PtcsrOutliers)}


def word_dtype(columns: int) -> torch.dtype:
    """The type of a word: int32 where 16 bits tell all columns, else int64."""
    return torch.int32 if columns <= NARROW_COLUMNS else torch.int64


def column_bits(columns: int) -> int:
    """How many bits of a word tell the column."""
    return NARROW_BITS if columns <= NARROW_COLUMNS else WIDE_BITS


def no_outliers(shape: tuple[int, int]) -> CsrOutliers:
    """A matrix without outliers."""
    empty = torch.empty(0, dtype=torch.int64)
    return CsrOutliers.encode(shape, empty, empty, torch.empty(0, dtype=torch.float16))

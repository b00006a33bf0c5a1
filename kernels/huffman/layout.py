"""The parts of a Huffman-coded matrix, and the conditions under which a kernel may read it."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from jaxtyping import Int64, UInt8
from torch import Tensor

from toolkit.kernels.engine.parallel import over_rows
from toolkit.kernels.engine.tensors import BITS, expect
from toolkit.kernels.huffman import cpu
from toolkit.kernels.huffman.code import fill_table, is_complete
from toolkit.kernels.huffman.shared import EMPTY, LONGEST, SYMBOLS


@dataclass(frozen=True, eq=False)
class Coded:
    """A matrix as the codes of one byte of each element, and the other bytes as they are.

    The coded byte is an int8 number, bits 7 to 14 of a bf16 or fp16 number, and bits 23 to 30 of an fp32 one. The rest
    of a row is nothing, one byte of each number, or three: then all lowest bytes come first, and those with the sign
    last.
    """

    shape: tuple[int, int]
    dtype: torch.dtype
    lengths: UInt8[Tensor, " 256"]  # bits of each symbol's code; 0: it does not occur
    row_offsets: Int64[Tensor, " rows+1"]  # the bit at which the row before ends; a row begins on the next byte
    coded: UInt8[Tensor, " bytes"]  # the first code in the lowest bits; 8 more bytes at the end
    rest: UInt8[Tensor, "rows planes·columns"]

    def __post_init__(self):
        """Raise `ValueError` for tensors that do not fit the shape, before a kernel reads beyond them."""
        rows, columns = self.shape
        if self.dtype not in BITS:
            raise ValueError(f"elements are {self.dtype}; expected one of {', '.join(map(str, BITS))}")
        expect("lengths", self.lengths, torch.uint8, (SYMBOLS,), self.device)
        expect("row_offsets", self.row_offsets, torch.int64, (rows + 1,), self.device)
        expect("coded", self.coded, torch.uint8, (max(EMPTY, self.coded.numel()),), self.device)
        expect("rest", self.rest, torch.uint8, (rows, rest_bytes(columns, self.dtype)), self.device)

    @property
    def device(self) -> torch.device:
        """The device of the tensors."""
        return self.coded.device

    @cached_property
    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Codes, offsets, a table to be filled from the lengths, and the rest, as kernels take them."""
        table = np.empty(1 << LONGEST, np.uint64)
        return self.coded.numpy(), self.row_offsets.numpy(), table, self.rest.numpy()

    def check(self) -> None:
        """Raise `ValueError` unless each row's codes end where the offsets say; decodes all of it."""
        lengths, offsets = self.lengths.numpy(), self.row_offsets.numpy()
        if not is_complete(lengths):
            raise ValueError(f"lengths are those of no code of at most {LONGEST} bits")
        coded, _, table, _ = self.arrays
        fill_table(lengths, table)
        bits, (rows, columns) = np.zeros(self.shape[0], np.int64), self.shape
        over_rows(cpu.decoded_bits, rows, coded.nbytes, coded, offsets, table, lengths, columns, bits)
        expected = row_offsets(bits)
        wrong = np.flatnonzero(expected != offsets)
        if len(wrong):
            raise ValueError(f"row offset {wrong[0]} is {offsets[wrong[0]]}; the codes end at {expected[wrong[0]]}")
        if coded.size != coded_bytes(expected):
            raise ValueError(f"{coded.size} bytes of codes; expected {coded_bytes(expected)}")


def rest_bytes(columns: int, dtype: torch.dtype) -> int:
    """Bytes of a row that are not coded."""
    return columns * (dtype.itemsize - 1)


def row_offsets(bits: Int64[np.ndarray, " rows"]) -> Int64[np.ndarray, " rows+1"]:
    """Where rows of so many bits end, if each begins on a whole byte."""
    whole = -(-bits // 8)
    return np.concatenate([[0], 8 * (whole.cumsum() - whole) + bits])


def coded_bytes(offsets: Int64[np.ndarray, " rows+1"]) -> int:
    """Bytes of all codes and of the empty ones behind them."""
    return -(-int(offsets[-1]) // 8) + EMPTY

"""2:4 structured sparsity, as NVIDIA's sparse tensor cores store it."""

from dataclasses import dataclass
from typing import Self

import torch
from jaxtyping import UInt8
from torch import Tensor

from toolkit.errors import UserError
from toolkit.formats.packed import Packed, bits, expect, non_zero

GROUP = 4
KEPT = 2
BLOCK = 1024  # rows packed or decoded at once, to bound the memory of 64-bit indices


@dataclass(frozen=True, eq=False)
class TwoFour(Packed):
    """Two values of every group of four columns, and two bits for the place of each (arXiv:2104.08378, section 3).

    A group with fewer than two non-zeros also stores zeros (+0.0), the leftmost first. So every group has two places,
    ascending. Four places make a byte; the first one is in its lowest bits. −0.0 decodes as +0.0.

        [[1, 0, 0, 2],      values   1 2, 0 0, 0 3
         [0, 0, 0, 0],      places   0 3, 0 1, 0 1   (two bits each)
         [0, 3, 0, 0]]
    """

    name = "two_four"

    shape: tuple[int, int]
    values: Tensor  # [rows, columns / 2]
    places: UInt8[Tensor, " bytes"]  # ⌈rows · columns / 8⌉

    def __post_init__(self):
        """Raise `ValueError` for tensors of types or shapes that do not fit."""
        rows, columns = self.shape
        if columns % GROUP:
            raise ValueError(f"{columns} columns do not divide by {GROUP}")
        expect("values", self.values, self.values.dtype, (rows, columns // GROUP * KEPT))
        expect("places", self.places, torch.uint8, (-(-rows * columns // 8),))

    @property
    def dtype(self) -> torch.dtype:
        """The type of the elements."""
        return self.values.dtype

    @classmethod
    def encode(cls, weight: Tensor) -> Self:
        """Pack a matrix. Raises `UserError` naming the first group that has more than two non-zeros."""
        rows, columns = weight.shape
        if columns % GROUP:
            raise UserError(f"format 'two_four' needs columns that divide by {GROUP}; this matrix has {columns}")
        values = torch.empty(rows, columns // GROUP * KEPT, dtype=weight.dtype)
        places = torch.empty(rows, columns // GROUP * KEPT, dtype=torch.uint8)
        for first in range(0, rows, BLOCK):
            span = slice(first, first + BLOCK)
            present = non_zero(weight[span]).unflatten(1, (-1, GROUP))
            _refuse(present, first)
            kept = _kept(present)
            found = torch.where(present, bits(weight[span]).unflatten(1, (-1, GROUP)), 0).gather(-1, kept)
            bits(values)[span] = found.flatten(1)
            places[span] = kept.flatten(1).to(torch.uint8)
        return cls((rows, columns), values, _pack(places.flatten()))

    def _fill(self, out: Tensor) -> None:
        rows, columns = self.shape
        dense = bits(out).zero_().view(rows, columns // GROUP, GROUP)
        places = _unpack(self.places, self.values.numel()).view(self.values.shape)
        for first in range(0, rows, BLOCK):
            span = slice(first, first + BLOCK)
            kept = places[span].to(torch.int64).unflatten(1, (-1, KEPT))
            dense[span].scatter_(-1, kept, bits(self.values)[span].unflatten(1, (-1, KEPT)))

    def check(self) -> None:
        """Each group's places rise."""
        places = _unpack(self.places, self.values.numel()).view(-1, KEPT)
        if not bool((places[:, 0] < places[:, 1]).all()):
            raise ValueError("the places of a group do not rise")

    @classmethod
    def expected_nbytes(cls, shape: tuple[int, int], sparsity: float, dtype: torch.dtype) -> int:
        """Half of the elements and two bits for each of them, whatever the sparsity."""
        rows, columns = shape
        if columns % GROUP:
            raise UserError(f"format 'two_four' needs columns that divide by {GROUP}; {list(shape)} has {columns}")
        return rows * columns // 2 * dtype.itemsize + -(-rows * columns // 8)


def _kept(present: Tensor) -> Tensor:
    """The places [rows, groups, 2] that each group keeps: its non-zeros first, then zeros from the left."""
    patterns = torch.tensor([[pattern >> place & 1 for place in range(GROUP)] for pattern in range(1 << GROUP)])
    table = patterns.argsort(dim=1, descending=True, stable=True)[:, :KEPT].sort().values
    first, second, third, fourth = present.to(torch.uint8).unbind(-1)
    return table[(first | second << 1 | third << 2 | fourth << 3).to(torch.int64)]


def _refuse(present: Tensor, first_row: int) -> None:
    offences = present.sum(-1, dtype=torch.uint8) > KEPT
    if bool(offences.any()):
        row, group = offences.nonzero()[0].tolist()
        raise UserError(
            f"not 2:4: row {first_row + row}, columns {GROUP * group} to {GROUP * group + 3} hold "
            f"{int(present[row, group].sum())} non-zeros; prune with pattern '2:4' first"
        )


def _pack(places: Tensor) -> Tensor:
    padded = torch.zeros(-(-places.numel() // 4) * 4, dtype=torch.uint8)
    padded[: places.numel()] = places
    a, b, c, d = padded.view(-1, 4).unbind(1)
    return a | b << 2 | c << 4 | d << 6


def _unpack(packed: Tensor, count: int) -> Tensor:
    return torch.stack([packed >> shift & 3 for shift in (0, 2, 4, 6)], dim=1).flatten()[:count]

"""A matrix whose rows are stored as those of others: one after the other, or in another order.

GGUF files store a fused matrix in two tensors, and the rows of rotated pairs side by side. Blocks run along a row, so
the rows can be taken apart and put into order without a change of any block.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Self

import numpy as np
import torch
from jaxtyping import Int64
from torch import Tensor

from toolkit.errors import UserError
from toolkit.formats.packed import Packed
from toolkit.kernels.dense import take_rows
from toolkit.kernels.engine.parallel import Product, Task

AT_ONCE = 1 << 20  # values that are put into order at a time


@dataclass(frozen=True, eq=False)
class Parted(Packed):
    """Row i of the matrix is row `source[i]` of the `parts`, which follow each other; None keeps their order.

    It is not registered as a format, since any format can hold the parts, which decode to the same type. Raises
    `ValueError` for parts that do not make up a matrix.
    """

    name = "parted"

    parts: tuple[Packed, ...]
    source: Int64[np.ndarray, " rows"] | None = None

    def __post_init__(self):
        """Refuse parts of different widths or types, and an order of other rows."""
        if len(forms := {(part.shape[1], part.dtype) for part in self.parts}) != 1:
            raise ValueError(f"parts of different widths or types: {sorted(map(str, forms))}")
        if self.source is not None and not np.array_equal(np.sort(self.source), np.arange(self.shape[0])):
            raise ValueError(f"an order that does not have each of {self.shape[0]} rows once")

    @cached_property
    def shape(self) -> tuple[int, int]:
        """Rows of all parts, and columns."""
        return sum(part.shape[0] for part in self.parts), self.parts[0].shape[1]

    @property
    def dtype(self) -> torch.dtype:
        """The type that the parts decode to."""
        return self.parts[0].dtype

    @classmethod
    def encode(cls, weight: Tensor) -> Self:
        """Raise `UserError`: parts are packed each by itself."""
        raise UserError("parts are packed each by itself")

    @property
    def has_matvec(self) -> bool:
        """Whether all parts have a product of their own."""
        return all(part.has_matvec for part in self.parts)

    @property
    def has_batched_matvec(self) -> bool:
        """Whether those products take several vectors."""
        return all(part.has_batched_matvec for part in self.parts)

    @property
    def stored(self) -> Packed:
        """The first part, whose format is most likely that of all."""
        return self.parts[0].stored

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors of all parts."""
        return {f"{n}.{name}": it for n, part in enumerate(self.parts) for name, it in part.tensors.items()}

    @cached_property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        return sum(part.nbytes for part in self.parts)

    def matvec(self, x: Tensor) -> Tensor:
        """The products of the parts with `x` [*batch, columns], in order: fp32 [*batch, rows]."""
        found = [part.matvec(x) for part in self.parts]
        return self.in_order(torch.cat(found, dim=-1) if found[1:] else found[0])

    def product(self, x: Tensor, out: Tensor) -> Product | None:
        """The product of a single part, and a task that puts its rows into order; None for several parts."""
        if self.parts[1:]:
            return None
        if self.source is None:
            return self.parts[0].product(x, out)
        stored = torch.empty_like(out)
        if (found := self.parts[0].product(x, stored)) is None:
            return None
        ordering = Task(take_rows, (stored.numpy(), self.source, out.numpy()))
        return Product(found.task, found.before, (*found.after, ordering))

    def pieces(self, nbytes: int) -> Sequence[Packed]:
        """The pieces of all parts, as they are stored."""
        return [piece for part in self.parts for piece in part.pieces(nbytes)]

    def in_order(self, y: Tensor) -> Tensor:
        """Products of stored rows in the order of the matrix."""
        if self.source is None:
            return y
        return y.index_select(-1, torch.from_numpy(self.source))  # y[..., source] takes five times as long

    def check(self) -> None:
        """All parts agree with themselves."""
        for part in self.parts:
            part.check()

    def _fill(self, out: Tensor) -> None:
        first = 0
        for part in self.parts:
            part.unpack_into(out[first : first + part.shape[0]])
            first += part.shape[0]
        if self.source is not None:
            self._order(out)

    def _order(self, out: Tensor) -> None:
        """Put rows that lie as stored into order, some columns at a time."""
        source, step = torch.from_numpy(self.source), max(1, AT_ONCE // max(1, len(out)))
        for columns in out.split(step, dim=1):
            columns.copy_(columns[source])

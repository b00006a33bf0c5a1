"""int8 weights: a packed matrix of integers and one scale for each row."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Self

import torch
from jaxtyping import Float
from torch import Tensor

from toolkit.absmax import absmax_int8, dequantise, row_scales
from toolkit.errors import UserError
from toolkit.formats import encode
from toolkit.formats.dense import Dense
from toolkit.formats.packed import Packed, carve
from toolkit.kernels.dense import scale_rows
from toolkit.kernels.engine.parallel import Product, Task

SCALES = "row_scales"  # the scales' name in a store


@dataclass(frozen=True, eq=False)
class Scaled(Packed):
    """An int8 matrix in any format, and `scales`: a row of the weight is its integers times its scale.

    It is not registered as a format, since any format can hold the integers. A store records the format of the
    integers, and the scales as tensors beside them. Raises `ValueError` for parts that do not fit.
    """

    name = "scaled"

    packed: Packed
    scales: Float[Tensor, " rows"]

    def __post_init__(self):
        """Refuse anything but an int8 matrix with one scale for each row."""
        if self.packed.dtype != torch.int8 or not self.scales.is_floating_point():
            raise ValueError(f"{self.packed.dtype} values with {self.scales.dtype} scales; expected int8 and a float")
        if tuple(self.scales.shape) != (self.packed.shape[0],):
            raise ValueError(f"scales of shape {list(self.scales.shape)} for {self.packed.shape[0]} rows")

    @classmethod
    def encode(cls, form: str, weight: Float[Tensor, "rows columns"]) -> Self:
        """Quantise a weight by the largest magnitude of each row, and pack the integers in the format `form`.

        Raises `UserError` as `toolkit.formats.encode` does, and for a weight that is not floating-point.
        """
        if not weight.is_floating_point():
            raise UserError(f"cannot quantise a weight of {weight.dtype}; expected float32, float16 or bfloat16")
        scales = row_scales(weight)
        return cls(encode(form, absmax_int8(weight, scales)), scales.cpu())

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        return self.packed.shape

    @property
    def dtype(self) -> torch.dtype:
        """The type of the weight that integers and scales stand for."""
        return self.scales.dtype

    @property
    def has_matvec(self) -> bool:
        """Whether the format of the integers has a product of its own."""
        return self.packed.has_matvec

    @property
    def has_batched_matvec(self) -> bool:
        """Whether that product takes several vectors."""
        return self.packed.has_batched_matvec

    @property
    def stored(self) -> Packed:
        """The packed integers."""
        return self.packed

    @property
    def extras(self) -> dict[str, Tensor]:
        """The scales, by the name that a store gives them."""
        return {SCALES: self.scales}

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors of the packed integers, and the scales."""
        return {**self.packed.tensors, **self.extras}

    def _fill(self, out: Tensor) -> None:
        dequantise(self.packed.decode(), self.scales, out=out)

    def dense_in(self, scratch: Tensor) -> Tensor:
        """The weight in the first bytes of `scratch`; the integers are decoded into the bytes behind it."""
        out, behind = carve(scratch, self.shape, self.dtype)
        return dequantise(self.packed.dense_in(behind), self.scales, out=out)

    def matvec(self, x: Tensor) -> Tensor:
        """The integers times `x` [*batch, columns], then each row times its scale, in fp32 [*batch, rows]."""
        return self.packed.matvec(x).mul_(self.scales)

    def product(self, x: Tensor, out: Tensor) -> Product | None:
        """The product of the integers, and a task that multiplies with the scales."""
        found = self.packed.product(x, out)
        scaling = Task(scale_rows, (out.numpy(), self.scales.float().numpy()))
        return found and replace(found, after=(*found.after, scaling))

    def check(self) -> None:
        """The packed integers agree with each other."""
        self.packed.check()


def with_extras(packed: Packed, extras: Mapping[str, Tensor]) -> Packed:
    """A stored matrix with the tensors that lie beside it: a `Scaled` if scales are among them, else the matrix."""
    return Scaled(packed, extras[SCALES]) if SCALES in extras else packed


def unpacked(weight: Packed, out: Tensor) -> Packed:
    """The weight with its stored matrix made dense in `out`. Integers stay integers and keep their scales."""
    return with_extras(Dense(weight.shape, weight.stored.unpack_into(out)), weight.extras)

"""Integers of a few bits in groups: consecutive inputs of a row share a scale and a zero point in fp16."""

from dataclasses import dataclass
from typing import Self

import torch
from jaxtyping import Float, Float16, Int32, UInt8
from torch import Tensor

from toolkit.errors import UserError, unknown

BITS = range(2, 9)


@dataclass(frozen=True, eq=False)
class Groups:
    """A matrix whose weight is scale · (code − zero point), its codes packed without a gap.

    The last group of a row is shorter where the group does not divide the columns. `permutation` is the order that the
    columns were taken in, if it was another: column i of the codes is column `permutation[i]` of the weight.
    """

    shape: tuple[int, int]
    bits: int
    group: int
    packed: UInt8[Tensor, " bytes"]
    scales: Float16[Tensor, "rows groups"]
    zeros: Float16[Tensor, "rows groups"]
    permutation: Int32[Tensor, " columns"] | None = None

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The stored tensors, by name; `grid` holds the bits and the group."""
        grid = torch.tensor([self.bits, self.group], dtype=torch.int32)
        stored = {"grid": grid, "packed": self.packed, "scales": self.scales, "zeros": self.zeros}
        return stored if self.permutation is None else stored | {"permutation": self.permutation}

    @property
    def nbytes(self) -> int:
        """Bytes of all stored tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @classmethod
    def of_tensors(cls, shape: tuple[int, int], tensors: dict[str, Tensor]) -> Self:
        """The matrix of this shape whose `tensors` these are."""
        bits, group = tensors["grid"].tolist()
        return cls(shape, bits, group, *(tensors.get(name) for name in ("packed", "scales", "zeros", "permutation")))

    def decode(self) -> Float[Tensor, "rows columns"]:
        """The dense weight in the original order of its columns, float32."""
        codes = unpack(self.packed, self.bits, self.shape[0] * self.shape[1]).view(self.shape)
        scales, zeros = (part.float().repeat_interleave(self.group, 1) for part in (self.scales, self.zeros))
        dense = (codes - zeros[:, : self.shape[1]]) * scales[:, : self.shape[1]]
        return dense if self.permutation is None else dense[:, self.permutation.argsort()]


def check_grid(bits: int, group: int) -> None:
    """Raise `UserError` unless these can be the bits of a code and the size of a group."""
    if isinstance(bits, bool) or bits not in BITS:
        raise unknown("number of bits", bits, BITS)
    if isinstance(group, bool) or not isinstance(group, int) or group < 1:
        raise UserError(f"group is {group!r}; expected a whole number of inputs, at least 1")


def check_range(weight: Tensor) -> None:
    """Raise `UserError` for a weight that is not finite or too large for fp16."""
    if weight.numel() and not bool((weight.abs() <= torch.finfo(torch.float16).max).all()):
        raise UserError("cannot quantise a weight that is not finite or too large for fp16; load the model anew")


def levels(
    weight: Float[Tensor, "rows group"], bits: int
) -> tuple[Float16[Tensor, "rows 1"], Float16[Tensor, "rows 1"]]:
    """Scale and zero point of each row of a group: even steps from its least weight, or 0, to its greatest, or 0."""
    low, high = weight.amin(1, keepdim=True).clamp(max=0), weight.amax(1, keepdim=True).clamp(min=0)
    scale = ((high - low) / (2**bits - 1)).to(torch.float16)
    scale = torch.where(scale > 0, scale, 1)  # a group of zeros, or one below fp16's smallest number
    return scale, (-low / scale.to(weight.dtype)).to(torch.float16)


def encode(
    weight: Float[Tensor, "rows group"], scale: Float16[Tensor, "rows 1"], zero: Float16[Tensor, "rows 1"], bits: int
) -> UInt8[Tensor, "rows group"]:
    """The nearest codes."""
    return _nearest(weight, scale, zero, bits).to(torch.uint8)


def rounded(
    weight: Float[Tensor, "rows group"], scale: Float16[Tensor, "rows 1"], zero: Float16[Tensor, "rows 1"], bits: int
) -> Float[Tensor, "rows group"]:
    """The weights that the nearest codes stand for."""
    codes = _nearest(weight, scale, zero, bits)  # not as integers: two passes over the weights less
    return codes.sub_(zero.to(weight.dtype)).mul_(scale.to(weight.dtype))


def _nearest(weight: Tensor, scale: Tensor, zero: Tensor, bits: int) -> Tensor:
    steps = weight / scale.to(weight.dtype)
    return steps.add_(zero.to(weight.dtype)).round_().clamp_(0, 2**bits - 1)


def pack(codes: UInt8[Tensor, "..."], bits: int) -> UInt8[Tensor, " bytes"]:
    """Codes in row-major order, the lowest bit first, without a gap between them; the last byte is filled with zeros.

    The 3-bit codes 5, 1, 7 are the bits 101 100 111, which fill the bytes 0b11001101 and 0b1.
    """
    places = torch.arange(8, dtype=torch.uint8, device=codes.device)
    stream = ((codes.flatten()[:, None] >> places[:bits]) & 1).flatten()
    stream = torch.nn.functional.pad(stream, (0, -len(stream) % 8)).view(-1, 8)
    return (stream << places).sum(1, dtype=torch.uint8)


def unpack(packed: UInt8[Tensor, " bytes"], bits: int, count: int) -> UInt8[Tensor, " count"]:
    """The first `count` codes."""
    places = torch.arange(8, dtype=torch.uint8, device=packed.device)
    stream = ((packed[:, None] >> places) & 1).flatten()[: count * bits].view(count, bits)
    return (stream << places[:bits]).sum(1, dtype=torch.uint8)

"""Predictors that compute with the FFN's own weights: its gate, a copy in 4 bits, or all of them."""

from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from jaxtyping import BFloat16, Float, Float32, UInt8
from torch import Tensor
from torch.nn import functional

from toolkit.errors import UserError
from toolkit.models.activation import activation
from toolkit.models.ffn import FFN
from toolkit.predictors.predictor import Scored
from toolkit.quantization.groups import pack, unpack
from toolkit.quantization.rtn import RoundToNearest

BITS = 4
MIDDLE = 1 << (BITS - 1)  # torch's weight is (code − 8) · scale + zero
GROUPS = (64, 32)  # inputs that share a scale and a zero point: the first that divides them, of those that torch has
LANES = 16  # torch takes rows in multiples of this


@dataclass(frozen=True, eq=False)
class Gate(Scored):
    """The score is |act(gate · x)| · scale: the gate projection stays in memory (LLM in a flash, appendix C.5).

    With thresholds on the gate alone (criterion "gate", CATS) it is exact. With thresholds on act(gate) · up it is not,
    since up is unknown: `scale` then holds the usual size of up for each neuron.
    """

    name: ClassVar[str] = "gate"

    weight: Float[Tensor, "neurons hidden"]
    scale: Float32[Tensor, " neurons"]
    act: str

    @classmethod
    def of(cls, ffn: FFN, act: str, limit: float) -> Self:
        """The gate of an FFN, in place, with a `scale` of 1. Raises `UserError` for an FFN without a gate."""
        if ffn.gate is None:
            raise UserError("the FFN has no gate that could predict its neurons: take low_rank")
        return cls(float(limit), ffn.gate.weight.detach(), torch.ones(ffn.neurons), act)

    @property
    def shape(self) -> tuple[int, int]:
        """Neurons and inputs."""
        neurons, hidden = self.weight.shape
        return neurons, hidden

    def scores(self, x: Float[Tensor, "tokens hidden"]) -> Float32[Tensor, "tokens neurons"]:
        """Sizes of the gates, scaled."""
        gates = functional.linear(x.to(self.weight.dtype), self.weight)
        return activation(self.act)(gates).float().abs() * self.scale


def nbytes_of(neurons: int, hidden: int, gated: bool) -> int:
    """Bytes of the predictor of an FFN whose up projection has no bias.

    Raises `UserError` for inputs that are no multiple of 32, or rows that are no multiple of 16.
    """
    rows = neurons * (1 + gated)
    return rows * hidden * BITS // 8 + rows * hidden // _group_of(neurons, hidden) * 2 * torch.bfloat16.itemsize


def _group_of(neurons: int, hidden: int) -> int:
    """Inputs that share a scale."""
    group = next((size for size in GROUPS if hidden % size == 0), None)
    if group is None or neurons % LANES:
        raise UserError(f"{neurons} neurons with {hidden} inputs: expected multiples of {LANES} and {GROUPS[-1]}")
    return group


@dataclass(frozen=True, eq=False)
class FewBits(Scored):
    """The score is the magnitude of a neuron's output, computed with gate and up projection in 4 bits.

    The paper has no such predictor. A linear estimate of |act(gate) · up| is poor; an estimate from rounded weights is
    good. The copy takes 2/3 of an FFN with a gate at a quarter of its bits; torch's product of 4-bit weights reads no
    more.

    Args:
        packed: codes as torch packs them for this CPU; rows of the gate, if any, then of the up projection.
        scales: a scale and a zero for each group of inputs.
        bias: of the up projection; empty if there is none.
        act: the activation, by name.
        gated: whether there is a gate.
    """

    name: ClassVar[str] = "few_bits"
    in_magnitudes: ClassVar[bool] = True

    packed: UInt8[Tensor, "rows bytes"]
    scales: BFloat16[Tensor, "groups rows 2"]
    bias: Float[Tensor, " biases"]
    act: str
    gated: bool

    @classmethod
    def of(cls, ffn: FFN, act: str, limit: float) -> Self:
        """A copy of an FFN's gate and up projection.

        Raises `UserError` for an FFN whose inputs are no multiple of 32 or whose rows are no multiple of 16.
        """
        bias = torch.empty(0) if ffn.up.bias is None else ffn.up.bias.detach()
        weights = [linear.weight.detach() for linear in (ffn.gate, ffn.up) if linear]
        rounded = RoundToNearest(BITS, _group_of(ffn.neurons, ffn.up.in_features))(torch.cat(weights))
        scales = rounded.scales.float()
        zeros = scales * (MIDDLE - rounded.zeros.float())
        pairs = torch.stack([scales, zeros], dim=-1).transpose(0, 1).contiguous().bfloat16()
        return cls(float(limit), _packed(rounded.packed, rounded.shape), pairs, bias, act, ffn.gate is not None)

    @property
    def shape(self) -> tuple[int, int]:
        """Neurons and inputs."""
        return len(self.packed) // (1 + self.gated), 2 * self.packed.shape[1]

    def scores(self, x: Float[Tensor, "tokens hidden"]) -> Float32[Tensor, "tokens neurons"]:
        """Magnitudes of the outputs."""
        sums = self._product(x.bfloat16())
        act = activation(self.act)
        if not self.gated:
            return act(sums + self.bias if len(self.bias) else sums).float().abs()
        gates, ups = sums.chunk(2, dim=1)
        return (act(gates) * ups).float().abs()

    def stored(self) -> dict[str, Tensor]:
        """The tensors of a file: the codes in an order that no CPU decides."""
        codes = self._decoded(torch.tensor([1.0, 0.0]).expand(self.scales.shape).bfloat16().contiguous())
        return {"codes": pack((codes + MIDDLE).to(torch.uint8), BITS), "scales": self.scales, "bias": self.bias}

    @classmethod
    def restored(cls, codes: Tensor, scales: Tensor, **others) -> Self:
        """The predictor of a file's tensors."""
        shape = (scales.shape[1], 2 * codes.numel() // scales.shape[1])
        return cls(packed=_packed(codes, shape), scales=scales, **others)

    def _product(self, x: BFloat16[Tensor, "tokens hidden"]) -> BFloat16[Tensor, "tokens rows"]:
        if len(x) > self.shape[1]:  # decoding is itself a product, with as many rows as there are inputs
            return functional.linear(x, self._decoded(self.scales))
        return torch.ops.aten._weight_int4pack_mm_for_cpu(x, self.packed, self._group, self.scales)

    def _decoded(self, scales: BFloat16[Tensor, "groups rows 2"]) -> BFloat16[Tensor, "rows hidden"]:
        """The weights that these scales make of the codes: torch decodes by its product with the identity only."""
        identity = torch.eye(self.shape[1], dtype=torch.bfloat16)
        return torch.ops.aten._weight_int4pack_mm_for_cpu(identity, self.packed, self._group, scales).T

    @property
    def _group(self) -> int:
        return self.shape[1] // len(self.scales)


def _packed(codes: UInt8[Tensor, " bytes"], shape: tuple[int, int]) -> UInt8[Tensor, "rows bytes"]:
    """Codes without gaps, in torch's order."""
    plain = unpack(codes, BITS, shape[0] * shape[1]).view(shape)
    return torch.ops.aten._convert_weight_to_int4pack_for_cpu(plain.int(), 1)


@dataclass(frozen=True, eq=False)
class Oracle(Scored):
    """Predicts the active neurons and no other: it computes their outputs, with all weights but the down projection's.

    It is the upper limit of a predictor's quality and saves no memory.
    """

    name: ClassVar[str] = "oracle"
    in_magnitudes: ClassVar[bool] = True

    ffn: FFN
    act: str

    @classmethod
    def of(cls, ffn: FFN, act: str, limit: float) -> Self:
        """The oracle of an FFN, whose weights it shares."""
        return cls(float(limit), ffn, act)

    @property
    def shape(self) -> tuple[int, int]:
        """Neurons and inputs."""
        return self.ffn.neurons, self.ffn.up.in_features

    @property
    def nbytes(self) -> int:
        """Bytes of the gate and up projection."""
        return sum(linear.weight.nbytes for linear in (self.ffn.gate, self.ffn.up) if linear)

    def scores(self, x: Float[Tensor, "tokens hidden"]) -> Float32[Tensor, "tokens neurons"]:
        """Magnitudes of the outputs; the limit is the threshold."""
        x = x.to(self.ffn.up.weight.dtype)
        up = functional.linear(x, self.ffn.up.weight, self.ffn.up.bias)
        act = activation(self.act)
        outputs = act(up) if self.ffn.gate is None else act(functional.linear(x, self.ffn.gate.weight)) * up
        return outputs.float().abs()

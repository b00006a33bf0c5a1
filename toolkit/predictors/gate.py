"""The gate as a predictor: the gate projection stays in memory (LLM in a flash, appendix C.5).

Thresholds on the gate alone (criterion "gate", CATS) make it exact. Thresholds on act(gate) · up do not, since the
other factor is unknown: `scale` then holds the size of it that is usual for each neuron.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float, Float32
from torch import Tensor
from torch.nn import functional

from toolkit.errors import UserError
from toolkit.models.activation import activation
from toolkit.models.ffn import FFN
from toolkit.predictors.predictor import Predictor, expect


@dataclass(frozen=True, eq=False)
class Gate(Predictor):
    """The score is |act(gate · x)| · scale.

    Raises `UserError` for parts that do not fit each other, or an unknown activation.
    """

    name: ClassVar[str] = "gate"

    weight: Float[Tensor, "neurons hidden"]
    scale: Float32[Tensor, " neurons"]
    act: str

    def __post_init__(self):
        """Refuse parts that do not fit each other."""
        neurons = self.scale.shape[0] if self.scale.ndim else 0
        expect("weight", self.weight, (neurons, *self.weight.shape[1:2]))
        expect("scale", self.scale, (neurons,))
        activation(self.act)

    @classmethod
    def of(cls, ffn: FFN, act: str, limit: float, scale: Float[Tensor, " neurons"] | None = None) -> "Gate":
        """The gate of an FFN, in place; `scale` is 1 if not given. Raises `UserError` for an FFN without a gate."""
        if ffn.gate is None:
            raise UserError("the FFN has no gate that could predict its neurons: take low_rank")
        scale = torch.ones(ffn.neurons) if scale is None else scale.float()
        return cls(float(limit), ffn.gate.weight.detach(), scale, act)

    @property
    def shape(self) -> tuple[int, int]:
        """Neurons and inputs."""
        neurons, hidden = self.weight.shape
        return neurons, hidden

    def scores(self, x: Float[Tensor, "tokens hidden"]) -> Float32[Tensor, "tokens neurons"]:
        """Sizes of the gates, scaled."""
        gates = functional.linear(x.to(self.weight.dtype), self.weight)
        return activation(self.act)(gates).float().abs() * self.scale

"""The limit of what a predictor can reach: exactly the active neurons."""

from dataclasses import dataclass
from typing import ClassVar, Self

from jaxtyping import Float, Float32
from torch import Tensor
from torch.nn import functional

from toolkit.models.activation import activation
from toolkit.models.ffn import FFN
from toolkit.predictors.predictor import Predictor


@dataclass(frozen=True, eq=False)
class Oracle(Predictor):
    """Predicts the active neurons and no other: it computes their outputs, with all weights but the down projection's.

    It is the limit of what a predictor can reach, and no way to save memory.
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

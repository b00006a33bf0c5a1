"""A low-rank predictor: two small matrices (LLM in a flash, section 3.1 and figure 3b; after Deja Vu)."""

from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Float, Float32
from torch import Tensor
from torch.nn import functional

from toolkit.predictors.predictor import Predictor, expect


@dataclass(frozen=True, eq=False)
class LowRank(Predictor):
    """The score is a logit: outward · inward · x + bias. A limit of 0 is the paper's threshold of 0.5 on the sigmoid.

    Raises `UserError` for matrices that do not fit each other.
    """

    name: ClassVar[str] = "low_rank"

    inward: Float[Tensor, "rank hidden"]
    outward: Float[Tensor, "neurons rank"]
    bias: Float[Tensor, " neurons"]

    def __post_init__(self):
        """Refuse matrices that do not fit each other."""
        rank = self.inward.shape[0]
        neurons = self.bias.shape[0] if self.bias.ndim else 0
        expect("inward", self.inward, (rank, *self.inward.shape[1:2]))
        expect("outward", self.outward, (neurons, rank))
        expect("bias", self.bias, (neurons,))

    @property
    def rank(self) -> int:
        """Numbers that carry what is known of a token."""
        return len(self.inward)

    @property
    def shape(self) -> tuple[int, int]:
        """Neurons and inputs."""
        return len(self.bias), self.inward.shape[1]

    def scores(self, x: Float[Tensor, "tokens hidden"]) -> Float32[Tensor, "tokens neurons"]:
        """Logits."""
        inner = functional.linear(x.to(self.inward.dtype), self.inward)
        return functional.linear(inner, self.outward, self.bias).float()

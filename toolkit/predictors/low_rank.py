"""A low-rank predictor: two small matrices (LLM in a flash, section 3.1 and figure 3b; after Deja Vu)."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from jaxtyping import Float, Float32
from torch import Tensor, nn
from torch.nn import functional

from toolkit.errors import UserError
from toolkit.predictors.predictor import Predictor, expect
from toolkit.predictors.samples import Samples
from toolkit.predictors.training import EPOCHS, fit_logits
from toolkit.progress import progress

RANK = 128  # the paper's, in most layers


@dataclass(frozen=True, eq=False)
class LowRank(Predictor):
    """The score is a logit: outward · inward · x + bias. A limit of 0 is the paper's threshold of 0.5 on the sigmoid.

    Raises `UserError` for matrices that do not fit each other.
    """

    name: ClassVar[str] = "low_rank"
    trained: ClassVar[bool] = True

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

    @classmethod
    def fit(cls, model: nn.Module, limits: Iterable[float], samples: Samples | None = None) -> list[Self]:
        """Trained on the samples, with rank `RANK`, or as many as there are inputs."""
        return cls.train(samples, min(RANK, samples.inputs[0].shape[1]))

    @classmethod
    def train(
        cls, samples: Samples, ranks: int | Sequence[int], epochs: int = EPOCHS, seed: int = 0, dtype=torch.bfloat16
    ) -> list[Self]:
        """A predictor for each layer, with a limit of 0; one rank for all layers, or one each.

        `dtype` is what the weights are kept in. Raises `UserError` for another number of ranks than layers, or a rank
        below 1 or above the inputs.
        """
        ranks = [ranks] * samples.layers if isinstance(ranks, int) else list(ranks)
        if len(ranks) != samples.layers:
            raise UserError(f"{len(ranks)} ranks for {samples.layers} layers: give one each")
        most = samples.inputs[0].shape[1]
        if wrong := [rank for rank in ranks if not 1 <= rank <= most]:
            raise UserError(f"rank {wrong[0]}: expected 1 to {most}, the inputs of the FFN")
        generator = torch.Generator().manual_seed(seed)
        predictors = []
        with progress("training predictors", samples.layers, "layers") as bar:
            for layer, rank in enumerate(ranks):
                weights = fit_logits(samples.inputs[layer].float(), samples.active(layer), rank, epochs, generator)
                predictors.append(cls(0.0, *(weight.to(dtype) for weight in weights)))
                bar.update()
        return predictors

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

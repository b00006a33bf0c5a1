"""A low-rank predictor: two small matrices (LLM in a flash, section 3.1 and figure 3b; after Deja Vu).

Training starts from the best linear guess of the active bits through so many numbers (reduced-rank regression:
Izenman, 1975), which takes no steps. Then Adam lowers a logistic loss that weighs active and inactive neurons alike.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from jaxtyping import Bool, Float, Float32
from torch import Tensor, nn
from torch.nn import functional

from toolkit.errors import UserError
from toolkit.predictors.predictor import Scored
from toolkit.predictors.samples import Samples
from toolkit.progress import progress

RANK = 128  # the paper's, in most layers
EPOCHS, BATCH, RATE = 2, 128, 2e-3
RIDGE = 1e-3  # of the mean of the squared inputs
STEEP = 4.0  # logits for a difference of 1 in the guess


@dataclass(frozen=True, eq=False)
class LowRank(Scored):
    """The score is a logit: outward · inward · x + bias. A limit of 0 is the paper's 0.5 on the sigmoid."""

    name: ClassVar[str] = "low_rank"
    trained: ClassVar[bool] = True

    inward: Float[Tensor, "rank hidden"]
    outward: Float[Tensor, "neurons rank"]
    bias: Float[Tensor, " neurons"]

    @classmethod
    def fit(cls, model: nn.Module, limits: Iterable[float], samples: Samples | None = None) -> list[Self]:
        """Trained on the samples, with rank `RANK`, or as many as there are inputs."""
        return cls.train(samples, min(RANK, samples.inputs[0].shape[1]))

    @classmethod
    def train(
        cls,
        samples: Samples,
        ranks: int | Sequence[int],
        epochs: int = EPOCHS,
        seed: int | torch.Generator = 0,
        dtype=torch.bfloat16,
    ) -> list[Self]:
        """A predictor for each layer, with a limit of 0; one rank for all layers, or one each.

        The weights are kept in `dtype`. A generator as `seed` goes on from layer to layer. Raises `UserError` for
        another number of ranks than layers, or a rank below 1 or above the inputs.
        """
        ranks = [ranks] * samples.layers if isinstance(ranks, int) else list(ranks)
        if len(ranks) != samples.layers:
            raise UserError(f"{len(ranks)} ranks for {samples.layers} layers: give one each")
        most = samples.inputs[0].shape[1]
        if wrong := [rank for rank in ranks if not 1 <= rank <= most]:
            raise UserError(f"rank {wrong[0]}: expected 1 to {most}, the inputs of the FFN")
        generator = torch.Generator().manual_seed(seed) if isinstance(seed, int) else seed
        predictors = []
        with progress("training predictors", samples.layers, "layers") as bar:
            for layer, rank in enumerate(ranks):
                weights = fit_logits(samples.inputs[layer].float(), samples.active(layer), rank, epochs, generator)
                predictors.append(cls(0.0, *(weight.to(dtype) for weight in weights)))
                bar.update()
        return predictors

    @property
    def rank(self) -> int:
        """Numbers that carry the knowledge of a token."""
        return len(self.inward)

    @property
    def shape(self) -> tuple[int, int]:
        """Neurons and inputs."""
        return len(self.bias), self.inward.shape[1]

    def scores(self, x: Float[Tensor, "tokens hidden"]) -> Float32[Tensor, "tokens neurons"]:
        """Logits."""
        inner = functional.linear(x.to(self.inward.dtype), self.inward)
        return functional.linear(inner, self.outward, self.bias).float()


def fit_logits(
    x: Float32[Tensor, "tokens hidden"],
    active: Bool[Tensor, "tokens neurons"],
    rank: int,
    epochs: int,
    generator: torch.Generator,
) -> list[Float32[Tensor, "..."]]:
    """Both matrices and the bias of one layer's low-rank predictor."""
    bits = active.float()
    share = bits.mean().clamp(1 / bits.numel(), 1 - 1 / bits.numel())
    inward, outward = reduced_rank(x, bits - bits.mean(0), rank)
    weights = [inward, STEEP * outward, STEEP * (bits.mean(0) - share)]
    weights = [weight.clone().requires_grad_() for weight in weights]
    optimiser = torch.optim.Adam(weights, lr=RATE)
    with torch.enable_grad():
        for _ in range(epochs):
            for batch in torch.randperm(len(x), generator=generator).split(BATCH):
                logits = functional.linear(functional.linear(x[batch], weights[0]), weights[1], weights[2])
                loss = balanced_loss(logits, bits[batch], share)
                optimiser.zero_grad()
                loss.backward()
                optimiser.step()
    return [weight.detach() for weight in weights]


def balanced_loss(
    logits: Float32[Tensor, "tokens neurons"], bits: Float32[Tensor, "tokens neurons"], share: Float32[Tensor, ""]
) -> Float32[Tensor, ""]:
    """The mean logistic loss in which active neurons, a share `share` of all, weigh as much as the others together."""
    return functional.binary_cross_entropy_with_logits(logits, bits, pos_weight=(1 - share) / share)


def reduced_rank(
    x: Float32[Tensor, "tokens hidden"], y: Float32[Tensor, "tokens neurons"], rank: int
) -> tuple[Float32[Tensor, "rank hidden"], Float32[Tensor, "neurons rank"]]:
    """The matrices A, B for which x Aᵀ Bᵀ is the best guess of y, by least squares with a little ridge."""
    gram = x.T @ x
    gram.diagonal().add_(RIDGE * gram.diagonal().mean())
    values, vectors = torch.linalg.eigh(gram)
    whitening = vectors / values.sqrt()  # (x whitening)ᵀ (x whitening) is the identity
    cross = whitening.T @ (x.T @ y)
    _, directions = torch.linalg.eigh(cross @ cross.T)  # rising
    directions = directions[:, -rank:]
    return (whitening @ directions).T.contiguous(), cross.T @ directions

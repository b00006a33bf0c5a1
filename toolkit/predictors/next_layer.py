"""Experts and neurons of the next layer, predicted by the model's own weights (CORM, section 4.2).

    ids = predict_experts(x, following)                                 # layer i's input through gate i + 1
    neurons = predict_neurons(x, following, ids[0, 0], "silu", 0.25)    # through W1 of an expert that it names

Residual connections make the inputs of neighbouring layers similar, so the next layer's gate also works on this layer's
input. There is no training and no extra memory.
"""

from dataclasses import dataclass
from typing import ClassVar, Self

import numpy as np
import torch
from jaxtyping import Bool, Float, Float32, Int64
from torch import Tensor, nn
from torch.nn import functional

from toolkit.errors import UserError
from toolkit.models.activation import activation
from toolkit.models.experts import Experts, seen_routing
from toolkit.predictors.predictor import Context, Predictor
from toolkit.predictors.samples import Samples
from toolkit.progress import progress
from toolkit.sparsity.calibration import checked_windows, cut_windows
from toolkit.sparsity.recording import mixtures, spread
from toolkit.sparsity.thresholds import run_decoder


@torch.no_grad()
def predict_experts(x: Float[Tensor, "tokens hidden"], following: Experts) -> Int64[Tensor, "tokens per_token"]:
    """The experts that a later mixture's gate names for an earlier one's input, in falling order of their scores."""
    return following.scores(x).topk(following.per_token, dim=-1).indices


@torch.no_grad()
def predict_neurons(
    x: Float[Tensor, "tokens hidden"], following: Experts, expert: int, act: str, limit: float
) -> Bool[Tensor, "tokens neurons"]:
    """The neurons of an expert whose |act(W1 · x)| exceeds the limit."""
    return gate_sizes(x, following, expert, act) > limit


@dataclass(eq=False)
class OwnGate(Predictor):
    """The control: a mixture's gate with its own input, which names the experts that the model uses.

    The units are experts, and `Context.inputs` those of the mixtures.
    """

    name: ClassVar[str] = "own_gate"

    experts: Experts

    @classmethod
    def of_model(cls, model: nn.Module) -> list[Self]:
        """A predictor for each mixture of a model. Raises `UserError` for a model without experts."""
        return [cls(each) for each in mixtures(model)]

    @property
    def shape(self) -> tuple[int, int]:
        """Experts of the mixture, and inputs of its gate."""
        return self.experts.count, self.experts.hidden

    def mask(self, x: Float[Tensor, "tokens hidden"]) -> Bool[Tensor, "tokens experts"]:
        """The experts that the gate names."""
        ids = predict_experts(x, self.experts).cpu()
        return torch.zeros(len(x), self.experts.count, dtype=torch.bool).scatter_(1, ids, True)


class NextLayer(OwnGate):
    """Predicts a mixture's experts from the input of the mixture before; none in the first."""

    name: ClassVar[str] = "next_layer"
    stateful: ClassVar[bool] = True  # of the layers before, not of tokens

    def predict(self, context: Context) -> Int64[np.ndarray, " experts"]:
        """The experts that the gate names, rising."""
        if len(context.inputs) < 2:
            return np.empty(0, dtype=np.int64)
        return np.flatnonzero(self.mask(context.inputs[-2][None])[0].numpy())


@torch.no_grad()
def expert_samples(
    model: nn.Module, tokens: object, windows: int | None = None, sequence_length: int = 1024
) -> Samples:
    """The mixtures' inputs and the router's weight of each expert, over the first windows of a row of token ids.

    An expert counts as a neuron does: its output is its weight, 0 if the token does not use it. Raises `UserError` for
    a model without experts, or tokens that do not fit it.
    """
    found = mixtures(model)
    cut = checked_windows(model, cut_windows(tokens, windows, sequence_length))
    inputs: list[list[Tensor]] = [[] for _ in found]
    weights: list[list[Tensor]] = [[] for _ in found]

    def see(layer: int, x: Tensor, ids: Tensor, values: Tensor) -> None:
        inputs[layer].append(x)
        weights[layer].append(spread(ids, values, found[layer].count)[1])

    with seen_routing(model, see), progress("recording samples", len(cut), "windows") as bar:
        for window in cut:
            run_decoder(model, window)
            bar.update()
    ones = tuple(torch.ones(each.count) for each in found)
    return Samples(tuple(map(torch.cat, inputs)), tuple(map(torch.cat, weights)), ones, cut.shape[1])


@torch.no_grad()
def gate_limits(model: nn.Module, samples: Samples, zeros: float, act: str) -> Float32[Tensor, " layers"]:
    """For each mixture, the limit that this share of the used experts' |act(W1 · x)| does not exceed (θ)."""
    if not 0 <= zeros < 1:
        raise UserError(f"zeros: {zeros}; expected a share of at least 0 and below 1")
    limits = []
    for layer, experts in enumerate(mixtures(model)):
        sizes = [
            gate_sizes(samples.inputs[layer][used], experts, expert, act).flatten()
            for expert, used in enumerate(samples.active(layer).T)
        ]
        limits.append(torch.from_numpy(np.quantile(torch.cat(sizes).numpy(), zeros, keepdims=True)))
    return torch.cat(limits).float()


def gate_sizes(
    x: Float[Tensor, "tokens hidden"], experts: Experts, expert: int, act: str
) -> Float32[Tensor, "tokens neurons"]:
    """|act(W1 · x)| of an expert's neurons."""
    gate = experts.matrices(expert)[0]
    return activation(act)(functional.linear(x.to(gate.dtype), gate)).float().abs()

"""The base of every predictor of a layer's active neurons, with or without a state, and of those that use a score.

The caller steps a sequence: `start` once, with the neurons that its prompt's tokens used, and then, for each token,
`predict` before the layer's FFN is computed and `observe` after it. So a predictor may learn from the tokens before,
and from the layers before of the same token. A predictor without a state is a `mask` of many tokens at once.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import ClassVar, Self

import numpy as np
import torch
from jaxtyping import Bool, Float, Float32, Int64
from torch import Tensor, nn

from toolkit.errors import UserError
from toolkit.models.activation import activation_name
from toolkit.models.ffn import FFN, decoder_ffns
from toolkit.predictors.samples import Samples

TOKENS = 1024  # that are enough to choose a limit for a layer


@dataclass(frozen=True, eq=False)
class Context:
    """The knowledge about one token when the neurons of a layer are to be predicted.

    Args:
        layer: the number of the layer.
        inputs: of the FFNs (after their norm) of the layers up to this one, whose input is the last.
        active: the neurons that were active in each earlier layer, rising.
    """

    layer: int
    inputs: Sequence[Float[Tensor, " hidden"]]
    active: Sequence[Int64[np.ndarray, " active"]] = ()


class Predictor(ABC):
    """Predicts which neurons of one layer a token activates.

    Without a state it defines `mask`; with one (`stateful`) it defines `start`, `predict` and `observe`.
    """

    name: ClassVar[str]  # in files and tables
    stateful: ClassVar[bool] = False  # whether a prediction depends on the tokens or layers before
    trained: ClassVar[bool] = False  # whether `fit` learns from the samples

    @classmethod
    def fit(cls, model: nn.Module, limits: Iterable[float], samples: Samples | None = None) -> list[Self]:
        """A predictor for each layer of a model. Most need one FFN's input only: they define `of` alone.

        Args:
            model: its FFNs are looked at.
            limits: of each layer; an active neuron's output exceeds it.
            samples: of the model's FFNs, for a `trained` predictor.

        Raises `UserError` for FFNs that it has no place for, and `ValueError` for another number of limits.
        """
        act = activation_name(model)
        return [cls.of(ffn, act, limit) for ffn, limit in zip(decoder_ffns(model), limits, strict=True)]

    @classmethod
    def of(cls, ffn: FFN, act: str, limit: float) -> Self:
        """The predictor of one FFN, by its weights, the name of its activation and the layer's limit."""
        raise NotImplementedError(f"{cls.__name__} needs samples: use fit")

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int]:
        """Neurons of the layer, and inputs of its FFN."""

    @property
    def nbytes(self) -> int:
        """Bytes that stay in memory: the price of the predictor."""
        return 0

    def mask(self, x: Float[Tensor, "tokens hidden"]) -> Bool[Tensor, "tokens neurons"]:
        """Which neurons are predicted for each token, from the input of the layer's FFN alone."""
        raise NotImplementedError(f"{type(self).__name__} has a state: predict one token after the other")

    def start(self, prefill: Sequence[Int64[np.ndarray, " active"]]) -> None:  # noqa: B027 (without a state: nothing)
        """Begin a sequence and forget the one before. `prefill`: the neurons that each token of its prompt
        activated."""

    def predict(self, context: Context) -> Int64[np.ndarray, " neurons"]:
        """The neurons predicted to be active, rising."""
        return np.flatnonzero(self.mask(context.inputs[-1][None])[0].numpy())

    def observe(self, active: Int64[np.ndarray, " active"]) -> None:  # noqa: B027
        """Learn from the neurons, rising, that the last predicted token activated."""


@dataclass(frozen=True, eq=False)
class Scored(Predictor):
    """Predicts the neurons whose score exceeds `limit`. Tensors among its fields stay in memory: they are its price."""

    in_magnitudes: ClassVar[bool] = False  # whether a score guesses an output's magnitude, which a threshold limits

    limit: float

    @abstractmethod
    def scores(self, x: Float[Tensor, "tokens hidden"]) -> Float32[Tensor, "tokens neurons"]:
        """A score for each token and neuron; the higher, the more likely the neuron is active."""

    def mask(self, x: Float[Tensor, "tokens hidden"]) -> Bool[Tensor, "tokens neurons"]:
        """The neurons whose score exceeds the limit."""
        return self.scores(x) > self.limit

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors that stay in memory, by field."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, Tensor)}

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def stored(self) -> dict[str, Tensor]:
        """The tensors that a file keeps, by name."""
        return self.tensors

    @classmethod
    def restored(cls, **parts: object) -> Self:
        """The predictor of the parts that a file has kept."""
        return cls(**parts)

    def at(self, limit: float) -> Self:
        """The same predictor with another limit."""
        return replace(self, limit=float(limit))


def with_limits(predictors: Sequence[Scored], samples: Samples, kept: float) -> list[Scored]:
    """The predictors, each with the highest limit at which it keeps a share `kept` of its layer's magnitudes.

    A neuron's magnitude is the length of its contribution to the hidden state. So missing a small one costs little, as
    in the paper's false negatives (FLASH, appendix C.1). A score as high as the limit is not predicted; the limit is
    set just below the last score that is needed. Raises `UserError` for a share outside (0, 1).
    """
    if not 0 < kept < 1:
        raise UserError(f"kept {kept!r}: expected a share of the magnitudes between 0 and 1")
    return [predictor.at(_limit(predictor, samples, layer, kept)) for layer, predictor in enumerate(predictors)]


def _limit(predictor: Scored, samples: Samples, layer: int, kept: float) -> float:
    scores = predictor.scores(samples.inputs[layer][:TOKENS]).flatten()
    magnitudes = samples.magnitudes(layer)[:TOKENS].flatten()
    active = magnitudes.nonzero().squeeze(1)  # the others add nothing, and to sort them takes most of the time
    if not len(active):
        return scores.max().item()
    order = active[scores[active].argsort(descending=True)]
    total = magnitudes[order].double().cumsum(0)
    last = scores[order[int((total < kept * total[-1]).sum())]]
    return torch.nextafter(last, torch.tensor(-torch.inf)).item()

"""The base of every predictor of a layer's active neurons, with a state or without.

The caller steps a sequence: `start` once, with what its prompt's tokens used, and then, for each token, `predict`
before the layer's FFN is computed and `observe` after it. So a predictor may learn from the tokens before, and from
the layers before of the same token.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

import numpy as np
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn

from toolkit.models.activation import activation_name
from toolkit.models.ffn import FFN, decoder_ffns
from toolkit.predictors.samples import Samples


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


class Foresight(ABC):
    """Predicts which neurons of one layer a token activates."""

    name: ClassVar[str]  # in files and tables
    stateful: ClassVar[bool] = True  # whether a prediction depends on the tokens before
    trained: ClassVar[bool] = False  # whether `fit` learns from the samples

    @classmethod
    def fit(cls, model: nn.Module, limits: Iterable[float], samples: Samples | None = None) -> list[Self]:
        """A predictor for each layer of a model. Most need one FFN's input only: they define `of` alone.

        Args:
            model: its FFNs are looked at.
            limits: of each layer; an active neuron's output exceeds it.
            samples: of the model's FFNs, for what is `trained`.

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

    def start(self, prefill: Sequence[Int64[np.ndarray, " active"]]) -> None:  # noqa: B027 (without a state: nothing)
        """Begin a sequence and forget the one before. `prefill` holds what each of its prompt's tokens activated."""

    @abstractmethod
    def predict(self, context: Context) -> Int64[np.ndarray, " neurons"]:
        """The neurons predicted to be active, rising."""

    def observe(self, active: Int64[np.ndarray, " active"]) -> None:  # noqa: B027
        """Take in which neurons were active, rising, of the token last predicted."""


class Stateless(Foresight):
    """Predicts from the input of the layer's FFN alone."""

    stateful: ClassVar[bool] = False

    @abstractmethod
    def mask(self, x: Float[Tensor, "tokens hidden"]) -> Bool[Tensor, "tokens neurons"]:
        """Which neurons are predicted for each token."""

    def predict(self, context: Context) -> Int64[np.ndarray, " neurons"]:
        """The neurons of the mask, rising."""
        return np.flatnonzero(self.mask(context.inputs[-1][None])[0].numpy())

"""Predictors without memory: every neuron, no neuron, those of the last token, and those of a recorded trace."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Self

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from toolkit.models.ffn import FFN
from toolkit.predictors.predictor import Context, Predictor


@dataclass(eq=False)
class Weightless(Predictor):
    """Knows the size of a layer only."""

    neurons: int
    hidden: int

    @property
    def shape(self) -> tuple[int, int]:
        """Neurons and inputs."""
        return self.neurons, self.hidden

    @classmethod
    def of(cls, ffn: FFN, act: str, limit: float) -> Self:
        """The predictor of one FFN, whose size alone counts."""
        return cls(ffn.neurons, ffn.up.in_features)


class All(Weightless):
    """Predicts every neuron."""

    name: ClassVar[str] = "all"

    def mask(self, x: Float[Tensor, "tokens hidden"]) -> Bool[Tensor, "tokens neurons"]:
        """True."""
        return torch.ones(len(x), self.neurons, dtype=torch.bool)


class Nothing(Weightless):
    """Predicts no neuron."""

    name: ClassVar[str] = "nothing"

    def mask(self, x: Float[Tensor, "tokens hidden"]) -> Bool[Tensor, "tokens neurons"]:
        """False."""
        return torch.zeros(len(x), self.neurons, dtype=torch.bool)


@dataclass(eq=False)
class CopyLast(Weightless):
    """Predicts the neurons that the last token activated; none at the start of a sequence without a prompt."""

    name: ClassVar[str] = "copy_last"
    stateful: ClassVar[bool] = True

    _last: Int64[np.ndarray, " active"] = field(default_factory=lambda: np.empty(0, np.int64), repr=False)

    def start(self, prefill: Sequence[Int64[np.ndarray, " active"]]) -> None:
        """The last token is that of the prompt."""
        self._last = prefill[-1] if len(prefill) else np.empty(0, np.int64)

    def predict(self, context: Context) -> Int64[np.ndarray, " neurons"]:
        """The neurons that the last token activated."""
        return self._last

    def observe(self, active: Int64[np.ndarray, " active"]) -> None:
        """The token just computed is the last one from now on."""
        self._last = active


@dataclass(eq=False)
class FromTrace(Predictor):
    """Predicts, at its n-th call, the neurons that token n of a recorded text used: `active` [tokens, neurons].

    It serves comparisons in which all get the same predictions. After the last token it begins with the first again.
    """

    name: ClassVar[str] = "from_trace"

    active: Bool[np.ndarray, "tokens neurons"]
    hidden: int
    _next: int = field(default=0, init=False)

    @property
    def shape(self) -> tuple[int, int]:
        """Neurons and inputs."""
        return self.active.shape[1], self.hidden

    def predict(self, context: Context) -> Int64[np.ndarray, " neurons"]:
        """The neurons of the next token, rising."""
        token, self._next = self._next, (self._next + 1) % len(self.active)
        return np.flatnonzero(self.active[token])

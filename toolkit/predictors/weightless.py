"""Predictors that cost no byte, which all others are held against: every neuron, none, and those of the last token."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Self

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from toolkit.models.ffn import FFN
from toolkit.predictors.foresight import Context, Foresight, Stateless


@dataclass(eq=False)
class Weightless(Foresight):
    """Knows the size of a layer only."""

    neurons: int
    hidden: int

    @property
    def shape(self) -> tuple[int, int]:
        """Neurons and inputs."""
        return self.neurons, self.hidden

    @classmethod
    def of(cls, ffn: FFN, act: str, limit: float) -> Self:
        """The predictor of one FFN, of which its size is all that counts."""
        return cls(ffn.neurons, ffn.up.in_features)


class All(Weightless, Stateless):
    """Predicts every neuron."""

    name: ClassVar[str] = "all"

    def mask(self, x: Float[Tensor, "tokens hidden"]) -> Bool[Tensor, "tokens neurons"]:
        """True."""
        return torch.ones(len(x), self.neurons, dtype=torch.bool)


class Nothing(Weightless, Stateless):
    """Predicts no neuron."""

    name: ClassVar[str] = "nothing"

    def mask(self, x: Float[Tensor, "tokens hidden"]) -> Bool[Tensor, "tokens neurons"]:
        """False."""
        return torch.zeros(len(x), self.neurons, dtype=torch.bool)


@dataclass(eq=False)
class CopyLast(Weightless):
    """Predicts the neurons that the last token activated; none at the start of a sequence without a prompt."""

    name: ClassVar[str] = "copy_last"

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
class MostUsed(Weightless, Stateless):
    """Predicts the same units for every token: those that other text used most often."""

    name: ClassVar[str] = "profile"

    chosen: Int64[np.ndarray, " chosen"] = field(default_factory=lambda: np.empty(0, np.int64))

    @classmethod
    def of_tokens(cls, active: Bool[Tensor, "tokens units"], count: int, hidden: int = 0) -> Self:
        """The `count` units that these tokens use most often; of equal ones the first."""
        uses = active.sum(0)
        return cls(active.shape[1], hidden, np.sort(uses.argsort(descending=True, stable=True)[:count].numpy()))

    def mask(self, x: Float[Tensor, "tokens hidden"]) -> Bool[Tensor, "tokens units"]:
        """The units chosen."""
        mask = torch.zeros(len(x), self.neurons, dtype=torch.bool)
        mask[:, torch.from_numpy(self.chosen)] = True
        return mask


@dataclass(eq=False)
class Chance(Weightless):
    """Predicts `count` units at random, the same ones with the same seed."""

    name: ClassVar[str] = "random"

    count: int = 1
    seed: int = 0

    def start(self, prefill: Sequence[Int64[np.ndarray, " active"]]) -> None:
        """Each sequence draws anew."""
        self._draws = np.random.default_rng(self.seed)

    def predict(self, context: Context) -> Int64[np.ndarray, " neurons"]:
        """Units drawn without regard to anything."""
        return np.sort(self._draws.permutation(self.neurons)[: self.count])

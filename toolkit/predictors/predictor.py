"""The base of predictors by a score.

The predictor gives each neuron of one layer a score, from the input of the layer's FFN (after its norm). It predicts
the neurons whose score exceeds its limit. Its tensors stay in memory, so their bytes are its price.
"""

from abc import abstractmethod
from dataclasses import dataclass, fields, replace
from typing import ClassVar, Self

import torch
from jaxtyping import Bool, Float, Float32
from torch import Tensor

from toolkit.errors import UserError
from toolkit.predictors.foresight import Stateless


@dataclass(frozen=True, eq=False)
class Predictor(Stateless):
    """Predicts the active neurons of one layer. `limit` is what the score of a predicted neuron exceeds."""

    in_magnitudes: ClassVar[bool] = (
        False  # whether a score guesses an output's magnitude, so that a threshold limits it
    )

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
    def settings(self) -> dict[str, object]:
        """The fields that are no tensors."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name not in self.tensors}

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def stored(self) -> dict[str, Tensor]:
        """The tensors that a file keeps, by name."""
        return self.tensors

    @classmethod
    def restored(cls, **parts: object) -> Self:
        """The predictor of what a file has kept. Raises `UserError` for parts that do not fit each other."""
        return cls(**parts)

    def at(self, limit: float) -> Self:
        """The same predictor with another limit."""
        return replace(self, limit=float(limit))


def expect(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    """Raise `UserError` unless a predictor's tensor holds finite floating-point numbers in this shape."""
    if not tensor.is_floating_point() or tuple(tensor.shape) != shape:
        raise UserError(f"{name} of a predictor: {tensor.dtype} {list(tensor.shape)}; expected numbers {list(shape)}")
    if not torch.isfinite(tensor).all():
        raise UserError(f"{name} of a predictor has numbers that are not finite: train it anew")

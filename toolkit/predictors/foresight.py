"""What every predictor of a layer's active neurons has in common, with a state or without.

The caller steps a sequence: `start` once, with what its prompt's tokens used, and then, for each token, `predict`
before the layer's FFN is computed and `observe` after it. So a predictor may learn from the tokens before, and from
the layers before of the same token.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from jaxtyping import Float, Int64
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Context:
    """What is known of one token when the neurons of a layer are to be predicted.

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

"""The predictor that costs nothing: a token activates what the last one did."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
from jaxtyping import Int64

from toolkit.predictors.foresight import Context, Foresight


@dataclass(eq=False)
class CopyLast(Foresight):
    """Predicts the neurons that the last token activated; none at the start of a sequence without a prompt."""

    name: ClassVar[str] = "copy_last"

    neurons: int
    hidden: int
    _last: Int64[np.ndarray, " active"] = field(default_factory=lambda: np.empty(0, np.int64), repr=False)

    @property
    def shape(self) -> tuple[int, int]:
        """Neurons and inputs."""
        return self.neurons, self.hidden

    def start(self, prefill: Sequence[Int64[np.ndarray, " active"]]) -> None:
        """The last token is that of the prompt."""
        self._last = prefill[-1] if len(prefill) else np.empty(0, np.int64)

    def predict(self, context: Context) -> Int64[np.ndarray, " neurons"]:
        """What the last token activated."""
        return self._last

    def observe(self, active: Int64[np.ndarray, " active"]) -> None:
        """The token just computed is the last one from now on."""
        self._last = active

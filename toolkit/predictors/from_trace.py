"""The neurons that a trace says, token after token: an exact predictor that costs nothing, for text that is known."""

from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
from jaxtyping import Bool, Int64

from toolkit.errors import UserError
from toolkit.predictors.foresight import Context, Foresight


@dataclass(eq=False)
class FromTrace(Foresight):
    """Predicts, at its n-th call, what token n of a recorded text used: `active` [tokens, neurons].

    It serves comparisons in which all get the same predictions. Raises `UserError` beyond the last token.
    """

    name: ClassVar[str] = "from_trace"
    stateful: ClassVar[bool] = False  # it learns nothing from the run

    active: Bool[np.ndarray, "tokens neurons"]
    hidden: int
    _next: int = field(default=0, init=False)

    @property
    def shape(self) -> tuple[int, int]:
        """Neurons and inputs."""
        return self.active.shape[1], self.hidden

    def predict(self, context: Context) -> Int64[np.ndarray, " neurons"]:
        """The neurons of the next token, rising."""
        if self._next == len(self.active):
            raise UserError(f"{len(self.active)} tokens were recorded, and one more is asked for: record more")
        self._next += 1
        return np.flatnonzero(self.active[self._next - 1])

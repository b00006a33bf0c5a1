"""Each neuron's state of 4 bits, which tokens raise and lower (Hermes, section IV-C1: the token-wise part)."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
from jaxtyping import Float, Int64, UInt8

from toolkit.errors import UserError
from toolkit.kernels import states
from toolkit.predictors.foresight import Context
from toolkit.predictors.weightless import Weightless

ALWAYS, NEVER = 0.90, 0.02  # shares of a prompt's tokens from which a neuron starts at 15, and below which at 0
GAIN, LOSS = 4, 1


@dataclass(eq=False)
class TokenState(Weightless):
    """Predicts the neurons whose state reaches a threshold. A token that uses a neuron adds 4, another takes 1 away.

    13 and a token that uses the neuron give 15; 10 and one that does not give 9; 0 stays 0. A neuron that is not
    predicted is not computed, so nothing raises its state: in an engine, what falls below the threshold never returns.

    Args:
        neurons: of the layer.
        hidden: inputs of its FFN.
        threshold: the state from which a neuron is predicted.
        gain: what a token adds that uses the neuron, up to 15 in all.
        loss: what another takes away, down to 0.

    Raises `UserError` for a threshold, gain or loss that is none.
    """

    name: ClassVar[str] = "token_state"

    threshold: int = states.HIGHEST
    gain: int = GAIN
    loss: int = LOSS
    _table: UInt8[np.ndarray, " bytes"] = field(init=False, repr=False)

    def __post_init__(self):
        """Refuse numbers that no state has."""
        if not (1 <= self.threshold <= 255 and 0 <= self.gain <= states.HIGHEST and 0 <= self.loss <= states.HIGHEST):
            raise UserError(
                f"threshold {self.threshold}, gain {self.gain}, loss {self.loss}: expected 1 to 255, and 0 to 15 each"
            )
        self.start([])

    @property
    def nbytes(self) -> int:
        """Bytes of the table: one for two neurons."""
        return table_nbytes(self.neurons)

    @property
    def states(self) -> UInt8[np.ndarray, " neurons"]:
        """The state of each neuron."""
        return states.unpacked(self._table, self.neurons)

    def start(self, prefill: Sequence[Int64[np.ndarray, " active"]]) -> None:
        """States by how often the prompt's tokens used each neuron; all are 0 without a prompt."""
        uses = np.bincount(np.concatenate([*prefill, np.empty(0, np.int64)]), minlength=self.neurons)
        self._table = states.packed(stages(uses / max(1, len(prefill))))

    def predict(self, context: Context) -> Int64[np.ndarray, " neurons"]:
        """The neurons whose state reaches the threshold."""
        mask = np.empty(self.neurons, bool)
        states.predict(self._table, self.threshold, mask)
        return np.flatnonzero(mask)

    def observe(self, active: Int64[np.ndarray, " active"]) -> None:
        """Raise and lower the states."""
        states.observe(self._table, dense(active, self.neurons), self.gain, self.loss)


def stages(usage: Float[np.ndarray, " neurons"]) -> UInt8[np.ndarray, " neurons"]:
    """The first state: 0 for less than 2 % of a prompt's tokens, 15 for more than 90 %, and 14 equal steps between."""
    steps = states.HIGHEST - 1
    between = np.minimum(1 + np.floor((usage - NEVER) / (ALWAYS - NEVER) * steps), steps)
    return np.select([usage < NEVER, usage > ALWAYS], [0, states.HIGHEST], between).astype(np.uint8)


def table_nbytes(*neurons: int) -> int:
    """Bytes of the tables of layers with so many neurons: LLaMA-7B's take 232 KiB (Hermes, section IV-C1).

    >>> table_nbytes(*[4096 + 10752] * 32) // 1024
    232
    """
    return sum(-(-count // 2) for count in neurons)


def dense(active: Int64[np.ndarray, " active"], neurons: int) -> np.ndarray:
    """A boolean for each neuron."""
    mask = np.zeros(neurons, bool)
    mask[active] = True
    return mask

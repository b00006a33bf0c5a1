"""Which neurons stay in memory: those that the last k tokens used (LLM in a flash, section 3.1).

    window = SlidingWindow(neurons=4096, tokens=5, rows=1000)
    change = window.step(active)      # what to drop and what to load, before this token can be computed

The window counts the current token. So a token loads s_agg(k + 1) − s_agg(k) neurons on average, and s_agg(k) stay.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Int64

from toolkit.errors import UserError

NEVER = -1


@dataclass(frozen=True, eq=False)
class Change:
    """What one token changes: neurons to drop, then neurons to load, both rising; and the tokens that memory allows."""

    dropped: Int64[np.ndarray, " dropped"]
    loaded: Int64[np.ndarray, " loaded"]
    tokens: int


class SlidingWindow:
    """Keeps the neurons of one layer that the last `tokens` tokens used, as far as `rows` neurons of memory allow.

    When they do not suffice, the window shrinks for this token: the neurons used longest ago go first, all those that
    were last used by the same token together (appendix C.3). Later it grows again. More than `rows` neurons are never
    held, not even between dropping and loading. `rows` of None sets no limit.

    Raises `UserError` for a window of less than one token, or numbers below 1.
    """

    def __init__(self, neurons: int, tokens: int, rows: int | None = None):
        for name, value in {"neurons": neurons, "window of tokens": tokens, "rows": rows}.items():
            if value is not None and value < 1:
                raise UserError(f"{name}: {value}; expected 1 or more")
        self.neurons, self.tokens, self.rows = neurons, tokens, neurons if rows is None else rows
        self.clear()

    @classmethod
    def of_bytes(cls, neurons: int, tokens: int, budget_bytes: int, neuron_bytes: int) -> "SlidingWindow":
        """A window for a budget in bytes. Raises `UserError` if not even one neuron fits."""
        if budget_bytes < neuron_bytes:
            raise UserError(f"a budget of {budget_bytes} bytes holds no neuron: one takes {neuron_bytes} bytes")
        return cls(neurons, tokens, min(neurons, budget_bytes // neuron_bytes))

    def clear(self) -> None:
        """Forget everything: nothing is held."""
        self.now = 0
        self.last_active = np.full(self.neurons, NEVER)  # the number of the token that last used each neuron held

    @property
    def held(self) -> Bool[np.ndarray, " neurons"]:
        """Which neurons are in memory."""
        return self.last_active != NEVER

    def step(self, active: Int64[np.ndarray, " active"]) -> Change:
        """Take the next token, which needs these neurons, and tell what to drop and load for it.

        Raises `UserError`, and changes nothing, for neurons that the layer does not have, or more than memory holds.
        """
        active = self._checked(active)
        age = np.where(self.held, self.now - self.last_active, self.tokens)  # in tokens; 1 is the token before this one
        age[active] = 0
        holding = np.bincount(age, minlength=self.tokens)[: self.tokens].cumsum()  # neurons younger than age + 1
        allowed = max(1, int((holding <= self.rows).sum()))
        dropped = np.flatnonzero(self.held & (age >= allowed))
        loaded = active[self.last_active[active] == NEVER]
        self.last_active[dropped] = NEVER
        self.last_active[active] = self.now
        self.now += 1
        return Change(dropped, loaded, allowed)

    def forget(self, neurons: Int64[np.ndarray, " some"]) -> None:
        """Let some of the neurons that are held go at the next step, as if no token of the window had used them."""
        self.last_active[neurons] = max(0, self.now - self.tokens)

    def _checked(self, active: Int64[np.ndarray, " active"]) -> Int64[np.ndarray, " active"]:
        """The neurons, rising and each once."""
        active = np.unique(np.asarray(active, dtype=np.int64))
        if len(active) and not 0 <= active[0] <= active[-1] < self.neurons:
            raise UserError(f"neurons {active[0]} to {active[-1]}: the layer has 0 to {self.neurons - 1}")
        if len(active) > self.rows:
            raise UserError(
                f"one token needs {len(active)} neurons, and memory holds {self.rows}: allow {len(active)} or more"
            )
        return active

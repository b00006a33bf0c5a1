"""A window of tokens: units stay as long as one of the last k tokens used them (LLM in a flash, section 3.1).

The window counts the current token. So a token loads s_agg(k + 1) − s_agg(k) units on average, and s_agg(k) stay.
"""

import numpy as np
from jaxtyping import Int64

from toolkit.policies.residency import Residency, expect_positive


class SlidingWindow(Residency):
    """Keeps the units that the last `tokens` tokens used, as far as `rows` units of memory allow.

    When they do not suffice, the window shrinks for this token: the units used longest ago go first, all those that
    were last used by the same token together (appendix C.3). Later it grows again. More than `rows` units are never
    held, not even between dropping and loading. `last_active` is the number of the token that last used each unit
    held, the paper's last_k_active.
    """

    def __init__(self, units: int, tokens: int, rows: int | None = None):
        expect_positive(tokens=tokens)
        self.tokens = tokens
        super().__init__(units, rows)

    def clear(self) -> None:
        """Hold nothing, and begin again."""
        super().clear()
        self.now, self.last_active = 0, np.full(self.units, -self.tokens)

    def forget(self, units: Int64[np.ndarray, " some"]) -> None:
        """Let some units go at the next step, as if no token of the window had used them."""
        self.last_active[units] = self.now - self.tokens

    def _leaving(self, needed: Int64[np.ndarray, " needed"], loaded: int) -> Int64[np.ndarray, " dropped"]:
        age = np.where(self.held, self.now - self.last_active, self.tokens)  # in tokens; 1 is the token before this one
        age[needed] = 0
        holding = np.bincount(age, minlength=self.tokens)[: self.tokens].cumsum()  # units younger than age + 1
        allowed = max(1, int((holding <= self.rows).sum()))
        self._note(needed)
        return np.flatnonzero(self.held & (age >= allowed))

    def _note(self, needed: Int64[np.ndarray, " needed"]) -> None:
        self.last_active[needed] = self.now
        self.now += 1

    def _order(self) -> Int64[np.ndarray, " units"]:
        return self.last_active

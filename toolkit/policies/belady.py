"""The offline optimum: it knows the future, and drops what is needed again last (Belady, 1966).

No policy that loads on demand loads less with the same memory, so what it loads cannot be avoided.
"""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Int64

from toolkit.errors import UserError
from toolkit.policies.residency import Residency


class Belady(Residency):
    """Keeps what `future` needs soonest; `future` are the units that each token needs, the first token first.

    `step` must be called with these tokens in their order. Raises `UserError` for a token that differs or follows the
    last one.
    """

    def __init__(self, units: int, rows: int | None = None, *, future: Sequence[Int64[np.ndarray, " needed"]]):
        self.future = [np.unique(np.asarray(needed, dtype=np.int64)) for needed in future]
        self._uses = _uses_after(self.future, units)
        super().__init__(units, rows)

    def clear(self) -> None:
        """Hold nothing, and begin again with the first token."""
        super().clear()
        self.now, self.next_use = 0, np.full(self.units, len(self.future))

    def _note(self, needed: Int64[np.ndarray, " needed"]) -> None:
        if self.now >= len(self.future) or not np.array_equal(needed, self.future[self.now]):
            raise UserError(f"token {self.now} needs other units than the future that Belady was given")
        self.next_use[needed] = self._uses[self.now]
        self.now += 1

    def _order(self) -> Int64[np.ndarray, " units"]:
        return -self.next_use


def _uses_after(future: Sequence[Int64[np.ndarray, " needed"]], units: int) -> list[Int64[np.ndarray, " needed"]]:
    """For each token and unit that it needs, the next token that needs the unit; the number of tokens if none does."""
    for unit in (int(each) for needed in future if len(needed) for each in needed[[0, -1]]):
        if not 0 <= unit < units:
            raise UserError(f"the future needs unit {unit}: the layer has 0 to {units - 1}")
    following, uses = np.full(units, len(future)), []
    for number in range(len(future) - 1, -1, -1):
        uses.append(following[future[number]])
        following[future[number]] = number
    return uses[::-1]

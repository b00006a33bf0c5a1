"""Least frequently used: memory stays full, and the units that the fewest tokens used so far go first."""

import numpy as np
from jaxtyping import Int64

from toolkit.policies.residency import Residency


class Lfu(Residency):
    """Counts every unit's uses since the start, those of dropped units as well. The first of equal ones goes."""

    def clear(self) -> None:
        """Hold nothing, and forget all counts."""
        super().clear()
        self.uses = np.zeros(self.units, dtype=np.int64)

    def _note(self, needed: Int64[np.ndarray, " needed"]) -> None:
        self.uses[needed] += 1

    def _order(self) -> Int64[np.ndarray, " units"]:
        return self.uses

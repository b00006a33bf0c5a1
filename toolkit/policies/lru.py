"""Least recently used: memory stays full, and the units used longest ago go first."""

import numpy as np
from jaxtyping import Int64

from toolkit.policies.residency import Residency

LONG_AGO = -1


class Lru(Residency):
    """Keeps what was used last, as many units as `rows` allow. Units used by the same token go in their order."""

    def clear(self) -> None:
        """Hold nothing, and begin again."""
        super().clear()
        self.now, self.last_use = 0, np.full(self.units, LONG_AGO)

    def forget(self, units: Int64[np.ndarray, " some"]) -> None:
        """These units go before all others."""
        self.last_use[units] = LONG_AGO

    def _note(self, needed: Int64[np.ndarray, " needed"]) -> None:
        self.last_use[needed] = self.now
        self.now += 1

    def _order(self) -> Int64[np.ndarray, " units"]:
        return self.last_use

"""Units that are not needed go at random: what a policy must beat."""

import numpy as np
from jaxtyping import Float64, Int64

from toolkit.policies.residency import Residency


class RandomChoice(Residency):
    """Memory stays full. The same seed makes the same choices."""

    def __init__(self, units: int, rows: int | None = None, *, seed: int = 0):
        self.seed = seed
        super().__init__(units, rows)

    def clear(self) -> None:
        """Hold nothing, and draw again from the start."""
        super().clear()
        self._draws = np.random.default_rng(self.seed)

    def _note(self, needed: Int64[np.ndarray, " needed"]) -> None:
        """Chance learns nothing."""

    def _order(self) -> Float64[np.ndarray, " units"]:
        return self._draws.random(self.units)

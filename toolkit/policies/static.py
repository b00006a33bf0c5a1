"""A static choice: the units that were used most often on other text stay (Hermes's offline mapping, PowerInfer's)."""

import numpy as np
from jaxtyping import Float64, Int64

from toolkit.errors import UserError
from toolkit.policies.residency import Residency


class Static(Residency):
    """Memory stays full, and units of the lowest `frequency` [units] go first, whatever these tokens use.

    So the most frequent units stay once they were needed, and the others pass. Raises `UserError` unless each unit has
    a frequency.
    """

    def __init__(self, units: int, rows: int | None = None, *, frequency: Float64[np.ndarray, " units"]):
        self.frequency = np.asarray(frequency, dtype=np.float64)
        if self.frequency.shape != (units,) or np.isnan(self.frequency).any():
            raise UserError(f"frequencies {list(self.frequency.shape)}: expected {units} numbers, one for each unit")
        super().__init__(units, rows)

    def _note(self, needed: Int64[np.ndarray, " needed"]) -> None:
        """A static choice learns nothing."""

    def _order(self) -> Float64[np.ndarray, " units"]:
        return self.frequency

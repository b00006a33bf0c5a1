"""Least stale: the units whose layer came up most often without using them go first, for one cache of several layers.

LRU fails in such a cache: what a token needs next was used longest ago, one token before. The name and the idea are
SpecMD's (arXiv 2602.03921, 2026); the definition is the one below. In a cache of one layer it is LRU.
"""

import numpy as np
from jaxtyping import Int64

from toolkit.errors import UserError
from toolkit.policies.residency import Residency, expect_positive


class LeastStale(Residency):
    """Keeps units of `layers` layers; unit u belongs to layer u // (units / layers). A step is one layer, in order.

    First go the units that missed the most turns of their layer since they were last used. Among equal ones go those
    whose layer comes up again last. Raises `UserError` for units that do not divide into the layers, and `step` for
    units of a layer that is not the next one.
    """

    def __init__(self, units: int, rows: int | None = None, *, layers: int = 1):
        expect_positive(units=units, layers=layers)
        if units % layers:
            raise UserError(f"{units} units in {layers} layers: expected as many in each layer")
        self.layers, self.layer_of = layers, np.arange(units) // (units // layers)
        super().__init__(units, rows)

    def clear(self) -> None:
        """Hold nothing, and begin again with the first layer."""
        super().clear()
        self.now, self.last_use = -1, np.full(self.units, -self.layers)

    def forget(self, units: Int64[np.ndarray, " some"]) -> None:
        """These units go before all others."""
        self.last_use[units] = -self.layers

    def _note(self, needed: Int64[np.ndarray, " needed"]) -> None:
        layer = (self.now + 1) % self.layers
        if len(needed) and (self.layer_of[needed] != layer).any():
            raise UserError(f"units {needed.tolist()} at the turn of layer {layer}: expected units of this layer")
        self.now += 1
        self.last_use[needed] = self.now

    def _order(self) -> Int64[np.ndarray, " units"]:
        missed = (self.now - self.last_use) // self.layers
        until = (self.layer_of - self.now - 1) % self.layers + 1  # turns until the layer comes up again
        return -(missed * (self.layers + 1) + until)

"""A trace replayed against a residency policy: what each token loads and drops, without a disk or a model.

    tokens = replay([np.array([0, 1]), np.array([1, 2])], Lru(units=4, rows=2), unit_bytes=4096)
    tokens["loaded"].sum()

The engine's store of neurons makes the same changes for the same trace, to the unit.
"""

from collections.abc import Iterable

import numpy as np
import pandas as pd
from jaxtyping import Bool, Int64

from toolkit.policies.residency import Residency

COLUMNS = ["token", "loaded", "dropped", "held", "bytes"]


def replay(needed: Iterable[Int64[np.ndarray, " needed"]], residency: Residency, unit_bytes: int = 0) -> pd.DataFrame:
    """A row for each token, which needs these units: loaded, dropped and held units, and the bytes loaded.

    The policy goes on from what it holds. Raises what `Residency.step` raises.
    """
    rows = []
    for token, units in enumerate(needed):
        change = residency.step(units)
        loaded = len(change.loaded)
        rows.append((token, loaded, len(change.dropped), int(residency.held.sum()), loaded * unit_bytes))
    return pd.DataFrame(rows, columns=COLUMNS)


def units_of(active: Bool[np.ndarray, "tokens units"]) -> list[Int64[np.ndarray, " needed"]]:
    """The units that are active for each token, rising."""
    return [np.flatnonzero(token) for token in active]


def most_held(needed: Iterable[Int64[np.ndarray, " needed"]], residency: Residency) -> int:
    """The most units that a policy holds at once over these tokens, at least 1 (Req in LLM in a flash, C.3)."""
    return max([1, *replay(needed, residency)["held"]])

"""The residency policies there are, by name. A policy with settings of its own takes them by name."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float64, Int64

from toolkit.errors import unknown
from toolkit.policies.belady import Belady
from toolkit.policies.hot_table import HotTable
from toolkit.policies.least_stale import LeastStale
from toolkit.policies.lfu import Lfu
from toolkit.policies.lru import Lru
from toolkit.policies.random_choice import RandomChoice
from toolkit.policies.residency import Residency
from toolkit.policies.sliding_window import SlidingWindow
from toolkit.policies.static import Static

RESIDENCIES: dict[str, type[Residency]] = {
    "window": SlidingWindow,
    "lru": Lru,
    "lfu": Lfu,
    "least_stale": LeastStale,
    "random": RandomChoice,
    "hot_table": HotTable,
    "static": Static,
    "belady": Belady,
}


def residency_of(
    name: str,
    units: int,
    rows: int,
    needed: Sequence[Int64[np.ndarray, " needed"]] = (),
    frequency: Float64[np.ndarray, " units"] | None = None,
    window: int = 5,
) -> Residency:
    """A policy by its name, with what it must know of the tokens that come.

    Args:
        units: neurons or experts of a layer.
        rows: units that memory holds.
        needed: the units of each token, for "belady".
        frequency: how often each unit is used, for "static".
        window: tokens, for "window".

    Raises `UserError` for an unknown policy.
    """
    if name not in RESIDENCIES:
        raise unknown("residency policy", name, RESIDENCIES)
    settings = {"window": {"tokens": window}, "static": {"frequency": frequency}, "belady": {"future": needed}}
    return RESIDENCIES[name](units, rows=rows, **settings.get(name, {}))

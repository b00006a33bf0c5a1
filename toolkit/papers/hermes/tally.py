"""Units counted by place and level, and some of each picked: the two steps of moving units between places."""

import numpy as np
from jaxtyping import Int64, Shaped


def tally(
    place: Shaped[np.ndarray, " units"], level: Shaped[np.ndarray, " units"], places: int, levels: int
) -> Int64[np.ndarray, "places levels"]:
    """How many units have each place and level, whole numbers of 0 and more, below `places` and `levels`.

    Truth values are 0 and 1.
    """
    assert len(place) == len(level), "places and levels of different units"
    for name, numbers, count in (("place", place, places), ("level", level, levels)):
        assert numbers.min(initial=0) >= 0, f"{name} below 0"
        assert numbers.max(initial=0) < count, f"{name} beyond the last one"
    return np.bincount(_cells(place, level, levels), minlength=places * levels).reshape(places, levels)


def pick(
    place: Shaped[np.ndarray, " units"], level: Shaped[np.ndarray, " units"], quota: Int64[np.ndarray, "places levels"]
) -> Int64[np.ndarray, " picked"]:
    """The first `quota` units of each place and level, rising: at most as many as `tally` counted in these arrays."""
    cells, limits = _cells(place, level, quota.shape[1]), quota.ravel()
    units = np.flatnonzero(limits[cells])
    units = units[np.argsort(cells[units], kind="stable")]
    cells = cells[units]  # equal ones lie together, so a unit's number in its cell is the distance from the first one
    number = np.arange(len(units)) - np.searchsorted(cells, cells)
    return np.sort(units[number < limits[cells]])


def _cells(place: np.ndarray, level: np.ndarray, levels: int) -> Int64[np.ndarray, " units"]:
    return place.astype(np.int64) * levels + level

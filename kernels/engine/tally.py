"""Units counted by place and level, and some of each picked: the two steps of moving units between places."""

import numpy as np
from jaxtyping import Int64, Shaped

from toolkit.kernels.engine.compiled import compiled

TABLES = 4  # neighbours are counted in different ones, so that no addition waits for the one before


@compiled
def _tally(place, level, counts):
    whole = len(place) // 4 * 4
    for unit in range(0, whole, 4):
        counts[0, place[unit], level[unit]] += 1
        counts[1, place[unit + 1], level[unit + 1]] += 1
        counts[2, place[unit + 2], level[unit + 2]] += 1
        counts[3, place[unit + 3], level[unit + 3]] += 1
    for unit in range(whole, len(place)):
        counts[0, place[unit], level[unit]] += 1


@compiled
def _pick(place, level, quota, picked):
    found = 0
    for unit in range(len(place)):
        if quota[place[unit], level[unit]] > 0:
            quota[place[unit], level[unit]] -= 1
            picked[found] = unit
            found += 1
            if found == len(picked):
                break


def tally(
    place: Shaped[np.ndarray, " units"], level: Shaped[np.ndarray, " units"], places: int, levels: int
) -> Int64[np.ndarray, "places levels"]:
    """How many units have each place and level, whole numbers of 0 and more, below `places` and `levels`.

    Truth values are 0 and 1.
    """
    place, level = _unsigned(place), _unsigned(level)
    assert len(place) == len(level), "places and levels of different units"
    assert place.max(initial=0) < places, "place beyond the last one"
    assert level.max(initial=0) < levels, "level beyond the last one"
    counts = np.zeros((TABLES, places, levels), dtype=np.int32)
    _tally(place, level, counts)
    return counts.sum(0, dtype=np.int64)


def pick(
    place: Shaped[np.ndarray, " units"], level: Shaped[np.ndarray, " units"], quota: Int64[np.ndarray, "places levels"]
) -> Int64[np.ndarray, " picked"]:
    """The first `quota` units of each place and level, rising: at most as many as `tally` counted in these arrays."""
    picked = np.empty(int(quota.sum()), dtype=np.int64)
    if len(picked):
        _pick(_unsigned(place), _unsigned(level), quota.copy(), picked)
    return picked


def _unsigned(numbers: Shaped[np.ndarray, " units"]) -> Shaped[np.ndarray, " units"]:
    """In place: Numba takes a negative index for one from the end, and looks for it each time."""
    return numbers.view(f"u{numbers.itemsize}")

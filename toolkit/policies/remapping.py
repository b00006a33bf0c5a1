"""Moving cold neurons between DIMMs once a window of tokens, so that no DIMM waits for another (Hermes, section IV-D).

for window in windows:                                   # of 5 tokens
    dimm, moved = remap(window.sum(0), dimm, dimms=8)    # after it, for the next ones
"""

import numpy as np
from jaxtyping import Int8, Int64, Integer

from toolkit.errors import UserError
from toolkit.kernels.common.tally import pick, tally
from toolkit.policies.residency import expect_positive

WINDOW = 5  # tokens


def remap(
    activity: Integer[np.ndarray, " neurons"], dimm: Int8[np.ndarray, " neurons"], dimms: int, limit: int | None = None
) -> tuple[Int8[np.ndarray, " neurons"], Int64[np.ndarray, " moved"]]:
    """Algorithm 1: pair the busiest DIMM with the least busy, the second with the second, and level each pair.

    The busier DIMM's most active neuron that does not make it the less busy one moves, then the next such neuron.

    Args:
        activity: how often each neuron was active in the window, from 0; 0 for neurons on the GPU.
        dimm: where each neuron lies.
        dimms: how many DIMMs there are.
        limit: the most neurons that a pair moves: what its link carries while the DIMMs wait for the GPU.

    Returns the new places, and the neurons that moved, rising. Raises `UserError` for numbers that cannot be.
    """
    expect_positive(dimms=dimms)
    if limit is not None and limit < 0:
        raise UserError(f"limit: {limit}; expected 0 neurons or more")
    if len(dimm) != len(activity) or not 0 <= dimm.min(initial=0) <= dimm.max(initial=0) < dimms:
        raise UserError(f"DIMMs of {len(dimm)} neurons: expected one of 0 to {dimms - 1} for each of {len(activity)}")
    if activity.min(initial=0) < 0:
        raise UserError(f"activity of neuron {activity.argmin()}: {activity.min()}; expected 0 or more")
    counts = tally(dimm, activity, dimms, int(activity.max(initial=0)) + 1)
    rising, quota, target = np.argsort(counts @ np.arange(counts.shape[1]), kind="stable"), np.zeros_like(counts), {}
    for light, heavy in zip(rising[: dimms // 2], rising[::-1], strict=False):
        quota[heavy] = _leaving(counts[heavy], counts[light], limit)
        target[heavy] = light
    moved, places = pick(dimm, activity, quota), dimm.copy()
    places[moved] = [target[place] for place in dimm[moved]]
    return places, moved


def _leaving(heavy: Int64[np.ndarray, " levels"], light: Int64[np.ndarray, " levels"], limit: int | None) -> list[int]:
    """How many neurons of each activity leave the busier of two DIMMs; `heavy[a]` are those active a times there."""
    difference, left = int((heavy - light) @ np.arange(len(heavy))), int(heavy.sum()) if limit is None else limit
    found = [0] * len(heavy)
    for activity in range(len(heavy) - 1, 0, -1):
        found[activity] = count = min(int(heavy[activity]), difference // (2 * activity), left)
        difference, left = difference - 2 * activity * count, left - count
    return found

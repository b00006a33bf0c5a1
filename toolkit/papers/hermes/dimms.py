"""Which DIMM each neuron of a block lies on, and which neurons move while tokens are generated (Hermes, section IV).

dimm = in_snake_order(order, dimms=8)                       # before anything is known of the tokens to come
dimm, moved = remap(window.sum(0), dimm, dimms=8)           # between DIMMs, after each window of 5 tokens
change = swap(state, hot, threshold=10, moves=20)           # hot neurons of the DIMMs against the GPU's
"""

import numpy as np
from jaxtyping import Bool, Float64, Int8, Int64, Integer, Shaped, UInt8

from toolkit.papers.hermes.tally import pick, tally
from toolkit.predictors.state_table import HIGHEST
from toolkit.residency.base import Change

WINDOW = 5  # tokens


def in_snake_order(order: Int64[np.ndarray, " neurons"], dimms: int) -> Int8[np.ndarray, " neurons"]:
    """Deal neurons, those of `order` first, to DIMMs 0, 1, 2, then 2, 1, 0, and again.

    Sorted by load, the loads of the DIMMs come near to each other, and the numbers of neurons differ by one at most.
    """
    turn, place = np.divmod(np.arange(len(order)), dimms)
    dimm = np.empty(len(order), dtype=np.int8)
    dimm[order] = np.where(turn % 2, dimms - 1 - place, place)
    return dimm


def by_chance(neurons: int, dimms: int, seed: int = 0) -> Int8[np.ndarray, " neurons"]:
    """As many neurons on each DIMM, in random order."""
    return in_snake_order(np.random.default_rng(seed).permutation(neurons), dimms)


def loads(
    activity: Shaped[np.ndarray, " neurons"], dimm: Int8[np.ndarray, " neurons"], dimms: int
) -> Float64[np.ndarray, " dimms"]:
    """The activity of each DIMM's neurons together: tokens, active neurons or seconds, as `activity` counts them."""
    return np.bincount(dimm, weights=activity, minlength=dimms)


def imbalance(load: Float64[np.ndarray, "*tokens dimms"]) -> Float64[np.ndarray, "*tokens"]:
    """The busiest DIMM's load over the mean of all; 1 where nothing is active."""
    mean = load.mean(-1)
    return np.divide(load.max(-1), mean, out=np.ones_like(mean), where=mean > 0)


def remap(
    activity: Integer[np.ndarray, " neurons"], dimm: Int8[np.ndarray, " neurons"], dimms: int, limit: int | None = None
) -> tuple[Int8[np.ndarray, " neurons"], Int64[np.ndarray, " moved"]]:
    """Algorithm 1: pair the busiest DIMM with the least busy, the second with the second, and level each pair.

    The most active neuron that leaves the busier DIMM the busier one moves, then the next such neuron.

    Args:
        activity: how often each neuron was active in the window, from 0; 0 for neurons on the GPU.
        dimm: where each neuron lies.
        dimms: how many DIMMs there are.
        limit: the most neurons that a pair moves: as many as its link carries while the DIMMs wait for the GPU.

    Returns the new places, and the neurons that moved, rising.
    """
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


def swap(state: UInt8[np.ndarray, " neurons"], hot: Bool[np.ndarray, " neurons"], threshold: int, moves: int) -> Change:
    """The online adjustment: neurons above `threshold` that are not on the GPU replace the coldest ones there.

    The hottest neuron replaces the coldest one, then the next pair, as long as the new one is hotter; at most `moves`
    pairs.

    Args:
        state: of each neuron, 0 to 15.
        hot: the neurons on the GPU.
        threshold: a neuron with more is hot.
        moves: how many are copied while the GPU computes something else.

    Returns the neurons that leave the GPU and those that replace them, as many. `hot` stays as it is.
    """
    counts = tally(hot, state, 2, HIGHEST + 1)
    quota = np.zeros_like(counts)
    coming, leaving = counts[0].tolist(), counts[1].tolist()
    high, low = HIGHEST, 0
    while moves and high > max(threshold, low):
        count = min(coming[high], leaving[low], moves)
        quota[0, high] += count
        quota[1, low] += count
        coming[high], leaving[low], moves = coming[high] - count, leaving[low] - count, moves - count
        high, low = high - (not coming[high]), low + (not leaving[low])
    moved = pick(hot, state, quota)
    return Change(moved[hot[moved]], moved[~hot[moved]])

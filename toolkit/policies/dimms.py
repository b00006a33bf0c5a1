"""Which DIMM each neuron of a block lies on before anything is known of the tokens to come: balanced, or by chance.

`toolkit.policies.remapping` moves them later.
"""

import numpy as np
from jaxtyping import Float64, Int8, Int64, Shaped

from toolkit.errors import UserError
from toolkit.policies.residency import expect_positive

MOST = 127  # DIMMs: their numbers take a byte


def in_snake_order(order: Int64[np.ndarray, " neurons"], dimms: int) -> Int8[np.ndarray, " neurons"]:
    """Deal neurons, those of `order` first, to DIMMs 0, 1, 2, then 2, 1, 0, and again.

    Sorted by load, the loads of the DIMMs come near to each other, and the numbers of neurons differ by one at most.
    """
    _expect_dimms(dimms)
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
    _expect_dimms(dimms)
    return np.bincount(dimm, weights=activity, minlength=dimms)


def imbalance(load: Float64[np.ndarray, "*tokens dimms"]) -> Float64[np.ndarray, "*tokens"]:
    """The busiest DIMM's load over the mean of all; 1 where nothing is active."""
    mean = load.mean(-1)
    return np.divide(load.max(-1), mean, out=np.ones_like(mean), where=mean > 0)


def _expect_dimms(dimms: int) -> None:
    expect_positive(dimms=dimms)
    if dimms > MOST:
        raise UserError(f"dimms: {dimms}; expected at most {MOST}")

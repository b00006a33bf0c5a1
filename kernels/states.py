"""A table of neurons' states, 4 bits each, that tokens raise and lower, and what it predicts (Hermes, section IV-C1).

Byte i of a table holds the state of neuron i in its lower half, and that of neuron i + ⌈neurons / 2⌉ in its upper one.
A layer takes one call a token on one thread, some microseconds.
"""

import numba
import numpy as np
from jaxtyping import Shaped, UInt8

from toolkit.kernels.engine.compiled import compiled

HIGHEST = 15
TOP, HALF = numba.uint8(HIGHEST), numba.uint8(4)  # the highest state, and the bits that one takes


@numba.njit(inline="always")
def _moved(state, active, gain, loss):
    """The state after a token."""
    raised = min(numba.uint8(state + gain), TOP)
    return raised if active else numba.uint8(state - min(state, loss))


@compiled
def _observe(table, active, gain, loss):
    """Move all states by one token."""
    lower, upper = active[: len(table)], active[len(table) :]
    for i in range(len(upper)):
        low = _moved(numba.uint8(table[i] & TOP), lower[i], gain, loss)
        high = _moved(numba.uint8(table[i] >> HALF), upper[i], gain, loss)
        table[i] = low | (high << HALF)
    if len(upper) < len(table):
        table[-1] = _moved(numba.uint8(table[-1] & TOP), lower[-1], gain, loss)


@compiled
def _count(first, second, active, out):
    """How many of its two parents are active, for each neuron."""
    for i in range(len(out)):
        out[i] = active[first[i]] + active[second[i]]


@compiled
def _predict(table, threshold, weight, out):
    """Replace the number of active parents by 1 where the sum reaches the threshold, and else by 0."""
    lower, upper = out[: len(table)], out[len(table) :]
    for i in range(len(lower)):
        lower[i] = numba.uint8((table[i] & TOP) + weight * lower[i]) >= threshold
    for i in range(len(upper)):
        upper[i] = numba.uint8((table[i] >> HALF) + weight * upper[i]) >= threshold


def packed(states: UInt8[np.ndarray, " neurons"]) -> UInt8[np.ndarray, " bytes"]:
    """The table of these states."""
    assert states.max(initial=0) <= HIGHEST, "states are 0 to 15"
    half = -(-len(states) // 2)
    table = states[:half].copy()
    table[: len(states) - half] |= states[half:] << 4
    return table


def unpacked(table: UInt8[np.ndarray, " bytes"], neurons: int) -> UInt8[np.ndarray, " neurons"]:
    """The states of a table."""
    return np.concatenate([table & HIGHEST, table >> 4])[:neurons]


def observe(table: UInt8[np.ndarray, " bytes"], active: Shaped[np.ndarray, " neurons"], gain: int, loss: int) -> None:
    """Raise the states of active neurons by `gain`, to 15 at most, and lower the others by `loss`, to 0 at least.

    `active` is boolean, or bytes of 0 and 1.
    """
    _check(table, active)
    assert 0 <= gain <= HIGHEST and 0 <= loss <= HIGHEST, "gain and loss are 0 to 15"  # noqa: PT018
    _observe(table, active.view(np.uint8), np.uint8(gain), np.uint8(loss))


def predict(
    table: UInt8[np.ndarray, " bytes"],
    threshold: int,
    out: Shaped[np.ndarray, " neurons"],
    parents: Shaped[np.ndarray, "2 neurons"] | None = None,
    active: Shaped[np.ndarray, " neurons_before"] | None = None,
    weight: int = 0,
) -> None:
    """Which neurons are predicted: state + `weight` · active parents ≥ `threshold`.

    Args:
        table: the states.
        threshold: 0 to 255.
        out: boolean, or bytes that become 0 or 1.
        parents: two neurons of the layer before for each, uint16 or uint32; without them the state decides.
        active: which neurons of the layer before were active for this token, boolean, or bytes of 0 and 1.
        weight: of a parent, up to 120.
    """
    _check(table, out)
    assert 0 <= threshold <= 255 and 0 <= weight <= 120, "threshold is 0 to 255, weight 0 to 120"  # noqa: PT018
    result = out.view(np.uint8)
    if parents is None or active is None:
        result[:] = 0
    else:
        assert parents.shape == (2, len(out)), "two parents for each neuron"
        assert active.itemsize == 1, "active is boolean or bytes"
        assert parents.max(initial=0) < len(active), "parents beyond the layer before"
        _count(parents[0], parents[1], active.view(np.uint8), result)
    _predict(table, np.uint8(threshold), np.uint8(weight), result)


def _check(table: np.ndarray, units: np.ndarray) -> None:
    assert (table.dtype, len(table)) == (np.uint8, -(-len(units) // 2)), "a table has a byte for two neurons"
    assert units.itemsize == 1, "one byte a neuron"

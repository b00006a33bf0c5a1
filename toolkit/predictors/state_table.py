"""A table of neurons' states, 4 bits each, that tokens raise and lower, and what it predicts (Hermes, section IV-C1).

Byte i of a table holds the state of neuron i in its lower half, and that of neuron i + ⌈neurons / 2⌉ in its upper one.
"""

import numpy as np
from jaxtyping import Shaped, UInt8

HIGHEST = 15


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
    states = unpacked(table, len(active))
    table[:] = packed(np.where(active, np.minimum(states + np.uint8(gain), HIGHEST), states - np.minimum(states, loss)))


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
        weight: of a parent, up to 120, so that the sum is below 256.
    """
    _check(table, out)
    assert 0 <= threshold <= 255 and 0 <= weight <= 120, "threshold is 0 to 255, weight 0 to 120"  # noqa: PT018
    score = unpacked(table, len(out))
    if parents is not None and active is not None:
        assert parents.shape == (2, len(out)), "two parents for each neuron"
        assert active.itemsize == 1, "active is boolean or bytes"
        assert parents.max(initial=0) < len(active), "parents beyond the layer before"
        first, second = active.view(np.uint8)[parents]
        score += np.uint8(weight) * (first + second)
    np.greater_equal(score, threshold, out=out.view(bool))


def _check(table: np.ndarray, units: np.ndarray) -> None:
    assert (table.dtype, len(table)) == (np.uint8, -(-len(units) // 2)), "a table has a byte for two neurons"
    assert units.itemsize == 1, "one byte a neuron"

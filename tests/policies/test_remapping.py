"""Algorithm 1 of Hermes, against a loop that moves one neuron at a time."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from toolkit.errors import UserError
from toolkit.policies.dimms import by_chance, imbalance, loads
from toolkit.policies.remapping import WINDOW, remap

NEURONS = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 4)), max_size=60)


def remapped(activity, dimm, dimms, limit=None):
    places, moved = remap(np.array(activity, dtype=np.int64), np.array(dimm, dtype=np.int8), dimms, limit)
    return places.tolist(), moved.tolist()


def naive(activity, dimm, dimms, limit):
    """Of each pair, move the most active neuron that does not turn the order around, until none is left."""
    dimm, moved = list(dimm), []
    load = [sum(a for a, d in zip(activity, dimm, strict=True) if d == each) for each in range(dimms)]
    order = sorted(range(dimms), key=lambda each: load[each])
    for pair in range(dimms // 2):
        light, heavy = order[pair], order[-1 - pair]
        for _ in range(len(activity) if limit is None else limit):
            fitting = [
                neuron
                for neuron in range(len(activity))
                if dimm[neuron] == heavy
                and neuron not in moved
                and 0 < 2 * activity[neuron] <= load[heavy] - load[light]
            ]
            if not fitting:
                break
            best = max(fitting, key=lambda n: (activity[n], -n))
            dimm[best] = light
            load[heavy], load[light] = load[heavy] - activity[best], load[light] + activity[best]
            moved.append(best)
    return dimm, sorted(moved)


def test_worked_example():
    """Loads of 12 and 4: one neuron of 4 moves, and both have 8."""
    activity, dimm = [5, 4, 3, 4, 0], [0, 0, 0, 1, 1]
    assert remapped(activity, dimm, 2) == ([0, 1, 0, 1, 1], [1])
    assert remapped(activity, [1, 1, 1, 0, 0], 2) == ([1, 0, 1, 0, 0], [1])
    assert remapped(activity, dimm, 2, limit=0) == (dimm, [])


def test_the_busiest_is_paired_with_the_idlest():
    """Loads 9, 1, 3 and 5: 9 and 1 are a pair, 5 and 3 are the other."""
    activity, dimm = [4, 4, 1, 1, 1, 2, 1, 4], [0, 0, 0, 1, 2, 2, 3, 3]
    assert remapped(activity, dimm, 4) == ([1, 0, 0, 1, 2, 2, 2, 3], [0, 6])


@settings(max_examples=200, deadline=None)
@given(neurons=NEURONS, dimms=st.integers(5, 7), limit=st.none() | st.integers(0, 4))
def test_as_one_move_after_the_other(neurons, dimms, limit):
    activity, dimm = [a for a, _ in neurons], [d for _, d in neurons]
    assert remapped(activity, dimm, dimms, limit) == naive(activity, dimm, dimms, limit)


def test_all_neurons_on_one_dimm():
    """Each window halves what the busiest of two has; eight DIMMs need three or more windows."""
    active, dimm = np.ones(800, dtype=np.int64), np.zeros(800, dtype=np.int8)
    seen = []
    for _ in range(8):
        seen.append(float(imbalance(loads(active, dimm, 8))))
        dimm, _ = remap(active, dimm, 8)
    assert seen[0] == 8
    assert seen[-1] == pytest.approx(1)


def test_nothing_active_and_one_dimm():
    assert remapped([0, 0, 0], [0, 1, 1], 2) == ([0, 1, 1], [])
    assert remapped([1, 2], [0, 0], 1) == ([0, 0], [])
    assert remapped([], [], 4) == ([], [])


def test_remapping_levels_a_steady_load():
    usage = np.random.default_rng(0).beta(0.12, 0.48, 4000)
    active = np.random.default_rng(1).random((40, 4000)) < usage
    dimm = np.sort(by_chance(4000, 8))[np.argsort(np.argsort(usage))]  # neurons of like frequency share a DIMM
    assert imbalance(np.array([loads(token, dimm, 8) for token in active])).mean() > 4
    for first in range(0, 20, WINDOW):
        dimm, _ = remap(active[first : first + WINDOW].sum(0), dimm, 8)
    assert imbalance(np.array([loads(token, dimm, 8) for token in active[20:]])).mean() < 1.2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([1, 2], [0, 2], 2), "DIMMs of 2 neurons: expected one of 0 to 1 for each of 2"),
        (([1, 2], [0, -1], 2), "expected one of 0 to 1"),
        (([1, -2], [0, 1], 2), "activity of neuron 1: -2; expected 0 or more"),
        (([1, 2], [0, 1], 0), "dimms: 0; expected 1 or more"),
        (([1, 2], [0, 1], 2, -1), "limit: -1; expected 0 neurons or more"),
    ],
)
def test_refusals(arguments, message):
    with pytest.raises(UserError, match=message):
        remapped(*arguments)

"""Neurons on DIMMs: dealt, remapped by Algorithm 1 of Hermes, and swapped with the GPU's, against slow loops."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from toolkit.papers.hermes.dimms import imbalance, in_snake_order, loads, remap, swap


def test_neurons_are_dealt_by_hand():
    assert in_snake_order(np.array([4, 2, 0, 1, 3]), 2).tolist() == [1, 0, 1, 0, 0]
    assert loads(np.array([1.0, 2, 3]), np.array([0, 2, 0], dtype=np.int8), 4).tolist() == [4, 0, 2, 0]
    assert imbalance(np.array([[12.0, 4], [0, 0], [3, 3]])).tolist() == [1.5, 1, 1]


NEURONS = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 4)), max_size=60)


def remapped(activity, dimm, dimms, limit=None):
    places, moved = remap(np.array(activity, dtype=np.int64), np.array(dimm, dtype=np.int8), dimms, limit)
    return places.tolist(), moved.tolist()


def naive(activity, dimm, dimms, limit):
    """In each pair, move the most active neuron that does not turn the order around, until none is left."""
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


@settings(max_examples=100, deadline=None)
@given(neurons=NEURONS, dimms=st.integers(5, 7), limit=st.none() | st.integers(0, 4))
def test_as_one_move_after_the_other(neurons, dimms, limit):
    activity, dimm = [a for a, _ in neurons], [d for _, d in neurons]
    assert remapped(activity, dimm, dimms, limit) == naive(activity, dimm, dimms, limit)


STATES = st.lists(st.tuples(st.integers(0, 15), st.booleans()), max_size=40)


def naive_swap(state, hot, threshold, moves):
    """Pair the hottest neuron outside with the coldest inside, the second with the second, while it is hotter."""
    neurons = range(len(state))
    coming = sorted((n for n in neurons if not hot[n] and state[n] > threshold), key=lambda n: -state[n])
    leaving = sorted((n for n in neurons if hot[n]), key=lambda n: state[n])
    pairs = [(new, old) for new, old in zip(coming, leaving, strict=False) if state[new] > state[old]][:moves]
    return sorted(old for _, old in pairs), sorted(new for new, _ in pairs)


def swapped(state, hot, threshold, moves):
    change = swap(np.array(state, dtype=np.uint8), np.array(hot, dtype=bool), threshold, moves)
    return change.dropped.tolist(), change.loaded.tolist()


def test_worked_example_of_a_swap():
    """Hermes, figure 8a: 3, 6 and 9 are hot; 6 is not on the GPU, and takes the place of 5, the coldest there."""
    state = [2, 0, 1, 12, 3, 4, 11, 0, 1, 13]
    hot = np.isin(range(10), [3, 5, 9])
    assert swapped(state, hot, threshold=10, moves=4) == ([5], [6])
    assert swapped(state, hot, threshold=11, moves=4) == ([], [])
    assert swapped(state, hot, threshold=10, moves=0) == ([], [])
    assert swapped([15, 15], [True, False], threshold=10, moves=4) == ([], [])  # none is hotter


@settings(max_examples=200, deadline=None)
@given(neurons=STATES, threshold=st.integers(0, 15), moves=st.integers(0, 5))
def test_swaps_as_sorted_lists_say(neurons, threshold, moves):
    state, hot = [state for state, _ in neurons], [hot for _, hot in neurons]
    assert swapped(state, hot, threshold, moves) == naive_swap(state, hot, threshold, moves)

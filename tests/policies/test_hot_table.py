"""The online adjustment of hot neurons, against sorted lists."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from toolkit.errors import UserError
from toolkit.policies.hot_table import swap

NEURONS = st.lists(st.tuples(st.integers(0, 15), st.booleans()), max_size=40)


def naive(state, hot, threshold, moves):
    """Pair the hottest neuron outside with the coldest inside, the second with the second, while it is hotter."""
    neurons = range(len(state))
    coming = sorted((n for n in neurons if not hot[n] and state[n] > threshold), key=lambda n: -state[n])
    leaving = sorted((n for n in neurons if hot[n]), key=lambda n: state[n])
    pairs = [(new, old) for new, old in zip(coming, leaving, strict=False) if state[new] > state[old]][:moves]
    return sorted(old for _, old in pairs), sorted(new for new, _ in pairs)


def swapped(state, hot, threshold, moves):
    change = swap(np.array(state, dtype=np.uint8), np.array(hot, dtype=bool), threshold, moves)
    return change.dropped.tolist(), change.loaded.tolist()


def test_worked_example():
    """Hermes, figure 8a: 3, 6 and 9 are hot; 6 is not on the GPU, and takes the place of 5, the coldest there."""
    state = [2, 0, 1, 12, 3, 4, 11, 0, 1, 13]
    hot = np.isin(range(10), [3, 5, 9])
    assert swapped(state, hot, threshold=10, moves=4) == ([5], [6])
    assert swapped(state, hot, threshold=11, moves=4) == ([], [])
    assert swapped(state, hot, threshold=10, moves=0) == ([], [])
    assert swapped([15, 15], [True, False], threshold=10, moves=4) == ([], [])  # none is hotter


@settings(max_examples=200, deadline=None)
@given(neurons=NEURONS, threshold=st.integers(0, 15), moves=st.integers(0, 5))
def test_as_sorted_lists_say(neurons, threshold, moves):
    state, hot = [state for state, _ in neurons], [hot for _, hot in neurons]
    assert swapped(state, hot, threshold, moves) == naive(state, hot, threshold, moves)


@pytest.mark.parametrize(
    ("state", "threshold", "moves", "message"),
    [
        ([3, 16], 8, 1, "2 states up to 16: expected 2 from 0 to 15"),
        ([3, 9], 16, 1, "threshold 16, moves 1: expected 0 to 15"),
        ([3, 9], 8, -1, "threshold 8, moves -1: expected 0 to 15, and 0 or more"),
    ],
)
def test_refusals(state, threshold, moves, message):
    with pytest.raises(UserError, match=message):
        swapped(state, [True, False], threshold, moves)

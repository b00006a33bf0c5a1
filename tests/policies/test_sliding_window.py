"""The sliding window: worked by hand, and against one made of sets."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import naive_activations as naive
from toolkit.errors import UserError
from toolkit.policies.sliding_window import SlidingWindow


def steps(window, *tokens):
    """What each token drops and loads."""
    changes = [window.step(np.array(sorted(active), dtype=np.int64)) for active in tokens]
    return [(change.dropped.tolist(), change.loaded.tolist()) for change in changes]


def test_worked_example():
    """Two tokens: what neither this token nor the one before it used goes."""
    window = SlidingWindow(units=6, tokens=2)
    found = steps(window, {0, 1, 2}, {1, 3}, {1, 4}, {0, 3}, set())
    assert found == [([], [0, 1, 2]), ([], [3]), ([0, 2], [4]), ([], [0]), ([1, 4], [])]
    assert np.flatnonzero(window.held).tolist() == [0, 3]


def test_worked_example_of_a_budget():
    """Memory holds 4. The third token leaves no room for all of the first one's, the fourth none for others."""
    window = SlidingWindow(units=9, tokens=3, rows=4)
    found = steps(window, {0, 1}, {1, 2}, {3, 4}, {5, 6, 7, 8}, {5}, {0})
    assert found == [
        ([], [0, 1]),
        ([], [2]),
        ([0], [3, 4]),
        ([1, 2, 3, 4], [5, 6, 7, 8]),
        ([], []),
        ([6, 7, 8], [0]),
    ]


def test_a_window_of_one_token_holds_that_token():
    window = SlidingWindow(units=4, tokens=1)
    assert steps(window, {0, 1}, {1, 2}) == [([], [0, 1]), ([0], [2])]


def test_after_clearing_all_is_loaded_again():
    window = SlidingWindow(units=4, tokens=3)
    steps(window, {0, 1})
    window.clear()
    assert steps(window, {1}) == [([], [1])]


@settings(max_examples=150, deadline=None)
@given(
    tokens=st.integers(1, 5),
    rows=st.integers(3, 12),
    actives=st.lists(st.sets(st.integers(0, 11), max_size=3), max_size=12),
)
def test_as_sets_say(tokens, rows, actives):
    window, oracle = SlidingWindow(12, tokens, rows), naive.Window(tokens, rows)
    for active in actives:
        ((dropped, loaded),) = steps(window, active)
        assert (set(dropped), set(loaded)) == oracle.step(active)
        held = set(np.flatnonzero(window.held).tolist())
        assert held == oracle.held
        assert active <= held
        assert len(held) <= rows


def test_what_cannot_be_held_is_refused():
    window = SlidingWindow(10, tokens=2, rows=3)
    steps(window, {0})
    with pytest.raises(UserError, match="one token needs 4 units, and memory holds 3: allow 4 or more"):
        window.step(np.arange(4))
    with pytest.raises(UserError, match="units 2 to 10: the layer has 0 to 9"):
        window.step(np.array([2, 10]))
    assert steps(window, {0, 1}) == [([], [1])]  # nothing was changed
    for wrong in ({"units": 0}, {"tokens": 0}, {"rows": 0}):
        with pytest.raises(UserError, match="expected 1 or more"):
            SlidingWindow(**{"units": 4, "tokens": 2, "rows": 2} | wrong)

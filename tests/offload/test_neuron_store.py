"""The manager of neurons in memory against a dict from neuron to bundle."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from toolkit.offload.neuron_store import ABSENT, NeuronStore
from toolkit.residency.policies import SlidingWindow

NEURONS, WIDTH = 12, 3
WEIGHTS = torch.arange(NEURONS * WIDTH).view(NEURONS, WIDTH).bfloat16()
BIASES = torch.arange(NEURONS) / 8


def fetch(neurons, rows):
    rows.copy_(WEIGHTS[torch.from_numpy(neurons)])


def store(tokens=2, rows=None, fetch=fetch, biases=BIASES):
    return NeuronStore(SlidingWindow(NEURONS, tokens, rows), WIDTH, torch.bfloat16, fetch, biases)


def neurons(*numbers):
    return np.array(numbers, dtype=np.int64)


def held(found):
    """The dict that the store stands for; a neuron in two rows would show as one row too few."""
    rows, bias = found.used
    held = dict(
        zip(found.pointer[: found.num_used].tolist(), zip(rows.tolist(), bias.tolist(), strict=True), strict=True)
    )
    assert len(held) == found.num_used
    assert all(found.row_of[neuron] == row for row, neuron in enumerate(held))
    assert (np.flatnonzero(found.row_of != ABSENT) == sorted(held)).all()
    assert (found.pointer[found.num_used :] == ABSENT).all()
    return held


def test_figure_6():
    """Rows hold neurons 0 to 4. Deleting 1 and 4 moves the last one that stays, 3, to row 1; 7 and 9 go behind it."""
    found = store()
    found.append(neurons(0, 1, 2, 3, 4))
    address = found.matrix.data_ptr()
    found.delete(neurons(1, 4))
    assert found.pointer[:3].tolist() == [0, 3, 2]
    assert (found.num_used, found.rows_moved) == (3, 1)
    found.append(neurons(7, 9))
    assert found.pointer[:5].tolist() == [0, 3, 2, 7, 9]
    rows, bias = found.used
    assert torch.equal(rows, WEIGHTS[[0, 3, 2, 7, 9]])
    assert torch.equal(bias, BIASES[[0, 3, 2, 7, 9]])
    assert found.matrix.data_ptr() == address


@settings(max_examples=100, deadline=None)
@given(
    tokens=st.integers(1, 4),
    rows=st.integers(4, NEURONS),
    actives=st.lists(st.sets(st.integers(0, NEURONS - 1), max_size=4), max_size=12),
)
def test_as_a_dict_says(tokens, rows, actives):
    found, oracle, policy = store(tokens, rows), {}, SlidingWindow(NEURONS, tokens, rows)
    for active in actives:
        change = policy.step(neurons(*sorted(active)))
        for neuron in change.dropped.tolist():
            del oracle[neuron]
        for neuron in change.loaded.tolist():
            oracle[neuron] = (WEIGHTS[neuron].tolist(), BIASES[neuron].item())
        moved, loaded = found.rows_moved, found.rows_loaded
        found.advance(neurons(*sorted(active)))
        assert held(found) == oracle
        assert (found.residency.held == policy.held).all()
        assert found.rows_moved - moved <= len(change.dropped)  # O(c)
        assert found.rows_loaded - loaded == len(change.loaded)
        assert len(found.matrix) == rows


def test_a_failed_fetch_leaves_an_empty_store_that_works():
    fail = False

    def unreliable(numbers, rows):
        rows[:1] = 1
        if fail:
            raise OSError("the disk is gone")
        fetch(numbers, rows)

    found = store(fetch=unreliable)
    found.advance(neurons(1, 2))
    fail = True
    with pytest.raises(OSError, match="the disk is gone"):
        found.advance(neurons(2, 3))
    assert held(found) == {}
    fail = False
    assert found.advance(neurons(2, 3)).loaded.tolist() == [2, 3]
    assert held(found).keys() == {2, 3}

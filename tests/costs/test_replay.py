"""A replayed trace against the store of neurons that the engine uses, and against a worked example."""

import numpy as np
import pytest
import torch

from toolkit.costs.replay import most_held, replay, units_of
from toolkit.offload.neuron_store import NeuronStore
from toolkit.policies.residencies import Belady, Lru, SlidingWindow
from toolkit.sparsity.synthetic import UsageLaw, draw

UNITS, ROWS = 40, 16
POLICIES = {
    "window": lambda layer, needed: SlidingWindow(UNITS, 3, ROWS),
    "lru": lambda layer, needed: Lru(UNITS, ROWS),
    "belady": lambda layer, needed: Belady(UNITS, ROWS, future=needed),
}


def test_worked_example():
    found = replay([np.array([0, 1]), np.array([1, 2]), np.array([2])], Lru(4, rows=2), unit_bytes=10)
    assert found.to_numpy().tolist() == [[0, 2, 0, 2, 20], [1, 1, 1, 2, 10], [2, 0, 0, 2, 0]]


@pytest.mark.parametrize("name", POLICIES)
def test_the_engine_loads_the_same_units(name):
    trace = draw("toy", [UsageLaw(0.2, 1.0, 0.6)] * 2, neurons=UNITS, tokens=30)
    for layer in range(trace.layers):
        needed = units_of(trace.active(layer)[0].numpy())
        fetched = []

        def fetch(units, rows, fetched=fetched):
            fetched.append(len(units))

        store = NeuronStore(POLICIES[name](layer, needed), 4, torch.bfloat16, fetch)
        rows = replay(needed, POLICIES[name](layer, needed), unit_bytes=8)
        for units, (_, row) in zip(needed, rows.iterrows(), strict=True):
            change = store.advance(units)
            assert (len(change.loaded), len(change.dropped)) == (row["loaded"], row["dropped"])
            assert store.num_used == row["held"]
        assert sum(fetched) == store.rows_loaded == rows["loaded"].sum()
        assert rows["bytes"].sum() == 8 * store.rows_loaded


def test_the_rows_that_a_window_needs_by_hand():
    active = [np.array(token, np.int64) for token in ([0, 1], [1, 2, 3], [3])]
    assert [most_held(active, SlidingWindow(4, window)) for window in (1, 2, 3)] == [3, 4, 4]
    assert most_held([np.array([], np.int64)], SlidingWindow(4, 1)) == 1
    assert most_held([], SlidingWindow(4, 1)) == 1

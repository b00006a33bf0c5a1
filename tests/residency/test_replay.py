"""Replays of traces and routing: worked by hand, and equal to what the engine loads, to the count."""

from concurrent.futures import Future
from dataclasses import astuple
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.notebook_code import functions_of
from toolkit.offload.expert_slots import ExpertSlots
from toolkit.offload.neuron_store import NeuronStore
from toolkit.residency.policies import Belady, LeastStale, Lru, SlidingWindow
from toolkit.residency.replay import COUNTS, most_held, rates, replay, replay_experts, units_of
from toolkit.residency.two_level import TwoLevel
from toolkit.sparsity.synthetic import UsageLaw, draw
from toolkit.sparsity.trace import Trace, pack
from toolkit.timeline import Recorder

FIG06 = functions_of("corm/fig06")

EXPERTS = 6
PAIR = st.sets(st.integers(0, EXPERTS - 1), min_size=2, max_size=2)
PASSES = st.lists(st.tuples(PAIR, st.one_of(st.none(), PAIR)), min_size=1, max_size=15)  # needed, expected


def routing(active):
    """A trace of one sequence from [layers, tokens, experts]."""
    active = torch.tensor(active, dtype=torch.bool)
    ids = torch.zeros(1, active.shape[1], dtype=torch.int32)
    bits = tuple(pack(layer[None]) for layer in active)
    return Trace("tiny", "by hand", ids, (active.shape[2],) * len(active), bits, "expert")


def test_worked_example():
    """Two slots, four neurons. Token 1 finds expert 0, but not its neuron 3; token 2 brings expert 2 for 1."""
    tokens = [{0: np.array([0, 1]), 1: np.array([2])}, {0: np.array([1, 3])}, {2: None}]
    found = replay_experts(tokens, TwoLevel(experts=3, neurons=4, slots=2))
    assert found["needed"].tolist() == [2, 1, 1]
    assert found["late"].tolist() == [2, 0, 1]
    assert found["neurons_needed"].tolist() == [3, 2, 4]
    assert found["neurons_late"].tolist() == [3, 1, 4]
    told = rates(found, neuron_bytes=30)
    assert (told["expert_hits"], told["neuron_hits"], told["loaded_bytes"]) == (0.25, 1 / 9, 80)
    assert told["prefetched_bytes"] == told["wasted_bytes"] == 0


def test_worked_example_of_a_prefetch():
    """Expert 1 is expected for the first token, which needs 0: it goes for 2 with both its neurons, which were wasted.

    Expert 2 is expected and needed, with one neuron of the two that were prefetched; the other one is never needed.
    """
    expected = [{1: None}, {2: None}]
    tokens = [{0: np.array([0])}, {2: np.array([1])}]
    found = replay_experts(tokens, TwoLevel(experts=3, neurons=2, slots=2), expected)
    assert found.to_dict("list") == {
        "needed": [1, 1], "late": [1, 0], "prefetched": [1, 1], "wasted": [0, 1],
        "neurons_needed": [1, 1], "neurons_late": [1, 0], "neurons_prefetched": [2, 2], "neurons_wasted": [0, 3],
    }  # fmt: skip
    told = rates(found, neuron_bytes=10)
    assert told == {"expert_hits": 0.5, "neuron_hits": 0.5} | {
        "loaded_bytes": 25, "prefetched_bytes": 20, "wasted_bytes": 15
    }  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(passes=PASSES, slots=st.integers(2, EXPERTS))
def test_the_engines_slots_count_the_same(passes, slots):
    done: Future[None] = Future()
    done.set_result(None)
    reader = SimpleNamespace(submit=lambda *_: done)
    runs = [SimpleNamespace(nbytes=8, chunks=()) for _ in range(EXPERTS)]
    arena = np.zeros((slots, 8), dtype=np.uint8)
    engine = ExpertSlots(TwoLevel(EXPERTS, 1, slots), runs, arena, reader, Recorder(), 0)
    for needed, ahead in passes:
        if ahead is not None:
            engine.prefetch(np.array(sorted(ahead)))
        engine.bring(np.array(sorted(needed)))
    engine.clear()
    expected = [None if ahead is None else dict.fromkeys(sorted(ahead)) for _, ahead in passes]
    found = replay_experts([dict.fromkeys(needed) for needed, _ in passes], TwoLevel(EXPERTS, 1, slots), expected)
    for prefix, counts in {"": engine.cache.of_experts, "neurons_": engine.cache.of_neurons}.items():
        assert found.sum()[[f"{prefix}{name}" for name in COUNTS]].tolist() == list(astuple(counts))


def test_the_cliff_of_one_lru_for_all_layers():
    """Three layers that always need the same two experts: LRU finds none with four rows, and all with six."""
    trace = routing(np.tile([1, 1, 0, 0], (3, 5, 1)).reshape(3, 5, 4))
    misses = {
        rows: FIG06.replay_global(trace, rows, lambda units, rows, _: Lru(units, rows))["loaded"].sum()
        for rows in (4, 6)
    }
    assert misses == {4: 30, 6: 6}
    stale = FIG06.replay_global(trace, 4, lambda units, rows, _: LeastStale(units, rows, layers=3))
    best = FIG06.replay_global(trace, 4, lambda units, rows, needed: Belady(units, rows, future=needed))
    assert best["loaded"].sum() <= stale["loaded"].sum() < 30
    assert stale["needed"].sum() == 30
    assert stale["token"].tolist() == sorted([*range(5)] * 3)


UNITS, ROWS = 40, 16
POLICIES = {
    "window": lambda layer, needed: SlidingWindow(UNITS, 3, ROWS),
    "lru": lambda layer, needed: Lru(UNITS, ROWS),
    "belady": lambda layer, needed: Belady(UNITS, ROWS, future=needed),
}


def test_worked_example_of_units():
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

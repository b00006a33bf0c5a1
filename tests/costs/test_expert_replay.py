"""Replays of a cache of experts and neurons: worked by hand, and equal to the engine's slots, to the count."""

from concurrent.futures import Future
from dataclasses import astuple
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.notebook_code import functions_of
from toolkit.costs.expert_replay import (
    COUNTS,
    rates,
    replay_experts,
)
from toolkit.errors import UserError
from toolkit.offload.expert_slots import ExpertSlots
from toolkit.policies.residencies import Belady, LeastStale, Lru
from toolkit.policies.two_level import TwoLevel
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
    assert (told["expert_hits"], told["loaded_bytes"], told["prefetched_bytes"], told["wasted_bytes"]) == (
        0.5,
        25,
        20,
        15,
    )
    with pytest.raises(UserError, match="1 expectations for 2 tokens"):
        replay_experts(tokens, TwoLevel(3, 2, 2), expected[:1])


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

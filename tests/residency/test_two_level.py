"""The cache of experts and their neurons: worked by hand, against dictionaries, and what it refuses."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import naive_residency as naive
from toolkit.residency.two_level import CacheCounts, TwoLevel

EXPERTS, NEURONS = 5, 6
SOME = st.one_of(st.none(), st.lists(st.integers(0, NEURONS - 1), max_size=NEURONS))
TOKENS = st.lists(st.dictionaries(st.integers(0, EXPERTS - 1), SOME, max_size=3), min_size=1, max_size=12)


def arrays(needed):
    return {expert: None if some is None else np.array(some, dtype=np.int64) for expert, some in needed.items()}


def found(change):
    return change.evicted.tolist(), change.placed, {expert: some.tolist() for expert, some in change.load.items()}


def test_worked_example():
    """Two slots. Expert 1 stays, and its neurons become the union; 3 takes 0's slot, and 0's neurons leave with it."""
    cache = TwoLevel(experts=4, neurons=4, slots=2)
    assert found(cache.step(arrays({0: [0, 1], 1: [2]}))) == ([], ((0, 0), (1, 1)), {0: [0, 1], 1: [2]})
    assert found(cache.step(arrays({1: [2, 3]}))) == ([], (), {1: [3]})
    assert cache.held(1).tolist() == [False, False, True, True]
    assert found(cache.step(arrays({1: [3], 3: [0]}))) == ([0], ((3, 0),), {3: [0]})
    assert cache.held(0).sum() == 0
    assert cache.held(3).tolist() == [True, False, False, False]
    assert found(cache.step(arrays({0: [1], 3: None}))) == ([1], ((0, 1),), {0: [1], 3: [1, 2, 3]})


@settings(max_examples=60, deadline=None)
@given(tokens=TOKENS, slots=st.integers(3, EXPERTS + 1))
def test_as_dictionaries_say(tokens, slots):
    cache, oracle = TwoLevel(EXPERTS, NEURONS, slots), naive.TwoLevel(NEURONS, slots)
    for needed in tokens:
        change = cache.step(arrays(needed))
        evicted, load = oracle.step(needed)
        assert (change.evicted.tolist(), {each: some.tolist() for each, some in change.load.items()}) == (evicted, load)
        assert change.neurons == sum(map(len, load.values()))
        for expert in range(EXPERTS):
            assert set(np.flatnonzero(cache.held(expert))) == oracle.held.get(expert, set())
        slots_used = cache.slot_of[cache.slot_of >= 0]
        assert len(set(slots_used)) == len(slots_used) == len(oracle.held) <= slots
    cache.clear()
    assert found(cache.step(arrays({0: None}))) == ([], ((0, 0),), {0: list(range(NEURONS))})


@settings(max_examples=40, deadline=None)
@given(tokens=TOKENS, data=st.data())
def test_a_prefetch_changes_when_and_not_what(tokens, data):
    """After a prefetch of any experts, a step leaves what it needs in memory, and loads only the rest."""
    cache = TwoLevel(EXPERTS, NEURONS, 3)
    for needed in tokens:
        expected = data.draw(st.dictionaries(st.integers(0, EXPERTS - 1), SOME, max_size=4))
        protect = sorted(data.draw(st.sets(st.integers(0, EXPERTS - 1), max_size=3)))
        before = {expert: cache.held(expert) for expert in range(EXPERTS)}
        early = cache.admit(arrays(expected), protect)
        assert not set(early.evicted.tolist()) & {*protect, *expected}
        assert set(early.load) <= set(expected)
        for expert in range(EXPERTS):
            lacks = np.flatnonzero(cache.held(expert) & ~before[expert])
            assert lacks.tolist() == early.load.get(expert, np.empty(0)).tolist()
        between = {expert: cache.held(expert) for expert in range(EXPERTS)}
        change = cache.step(arrays(needed))
        for expert, some in needed.items():
            wanted = np.isin(np.arange(NEURONS), range(NEURONS) if some is None else some)
            assert (cache.held(expert) >= wanted).all()
            missing = np.flatnonzero(wanted & ~between[expert])
            assert change.load.get(expert, np.empty(0)).tolist() == missing.tolist()


def test_a_prefetch_takes_the_likeliest_that_find_room():
    cache = TwoLevel(experts=4, neurons=2, slots=2)
    cache.step({0: None, 1: None})
    assert found(cache.admit({3: None, 2: None}, protect=[1])) == ([0], ((3, 0),), {3: [0, 1]})
    assert found(cache.admit({2: None}, protect=[1, 3])) == ([], (), {})
    assert found(cache.step({1: None, 3: None})) == ([], (), {})


def test_counts_of_a_hand_worked_example():
    """Two slots of two neurons: 0 and 1 are read late; 2 is prefetched in vain, 0 as well, and 1 comes back late."""
    cache = TwoLevel(experts=3, neurons=2, slots=2)
    cache.step({0: None, 1: np.array([0])})  # three neurons, all late
    cache.admit({2: np.array([1])})  # 0 goes, which was used first
    cache.step({1: None})  # its other neuron is late
    cache.admit({0: np.array([0])})  # 2 goes unused
    cache.step({0: np.array([0]), 1: np.array([1])})  # all are there
    assert cache.of_experts == CacheCounts(needed=5, late=2, prefetched=2, wasted=1)
    assert cache.of_neurons == CacheCounts(needed=3 + 2 + 2, late=3 + 1, prefetched=2, wasted=1)
    assert cache.of_experts.hit_rate == 3 / 5
    cache.admit({2: None})
    cache.clear()
    assert (cache.of_experts.wasted, cache.of_neurons.wasted) == (2, 3)

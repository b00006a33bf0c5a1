"""Every residency policy that is registered: what holds for all of them, worked examples, and obvious oracles."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import naive_activations
from tests import naive_residency as naive
from toolkit.errors import UserError
from toolkit.residency.policies import (
    RESIDENCIES,
    Belady,
    HotTable,
    Learned,
    LeastStale,
    Lfu,
    Lrfu,
    Lru,
    RandomChoice,
    SlidingWindow,
    Static,
)

UNITS = 8
TOKENS = st.lists(st.sets(st.integers(0, UNITS - 1), max_size=3), min_size=1, max_size=12)


def arrays(tokens):
    return [np.array(sorted(needed), dtype=np.int64) for needed in tokens]


def make(name, tokens, rows):
    settings_of = {"window": {"tokens": 3}, "belady": {"future": arrays(tokens)}}
    settings_of["static"] = {"frequency": np.array([0.5, 0.1, 0, 0.9, 0.1, 0.3, 0.3, 0.7])}
    return RESIDENCIES[name](UNITS, rows=rows, **settings_of.get(name, {}))


def changes(residency, tokens):
    found = [residency.step(needed) for needed in arrays(tokens)]
    return [(change.dropped.tolist(), change.loaded.tolist()) for change in found]


@pytest.mark.parametrize("name", RESIDENCIES)
@settings(max_examples=60, deadline=None)
@given(tokens=TOKENS, rows=st.integers(3, UNITS))
def test_what_holds_for_every_policy(name, tokens, rows):
    residency = make(name, tokens, rows)
    for needed, array in zip(tokens, arrays(tokens), strict=True):
        before = set(np.flatnonzero(residency.held).tolist())
        change = residency.step(array)
        dropped, loaded = set(change.dropped.tolist()), set(change.loaded.tolist())
        after = set(np.flatnonzero(residency.held).tolist())
        assert loaded == needed - before
        assert dropped <= before - needed
        assert after == before - dropped | loaded
        assert len(after) <= rows == residency.rows
        assert (np.diff(change.dropped) > 0).all()
    first = changes(make(name, tokens, rows), tokens)
    residency.clear()
    assert changes(residency, tokens) == first


@settings(max_examples=60, deadline=None)
@given(tokens=st.lists(st.sets(st.integers(0, 5), max_size=2), min_size=1, max_size=7), rows=st.integers(2, 4))
def test_belady_loads_as_little_as_any_choice(tokens, rows):
    assert sum(len(new) for _, new in changes(make("belady", tokens, rows), tokens)) == naive.fewest_loads(tokens, rows)


@settings(max_examples=60, deadline=None)
@given(tokens=TOKENS, rows=st.integers(3, UNITS))
def test_the_hot_table_as_a_dictionary_says(tokens, rows):
    states, held, residency = dict.fromkeys(range(UNITS), 0), set(), HotTable(UNITS, rows=rows)
    for needed, array in zip(tokens, arrays(tokens), strict=True):
        states = {unit: min(15, now + 4) if unit in needed else max(0, now - 1) for unit, now in states.items()}
        held |= needed
        while len(held) > rows:
            held.remove(min(held - needed, key=lambda unit: (states[unit], unit)))
        residency.step(array)
        assert set(np.flatnonzero(residency.held).tolist()) == held


@settings(max_examples=100, deadline=None)
@given(tokens=TOKENS, rows=st.integers(3, UNITS))
def test_lru_as_a_list_says(tokens, rows):
    oracle, residency = naive.Lru(rows), Lru(UNITS, rows)
    for needed, array in zip(tokens, arrays(tokens), strict=True):
        change = residency.step(array)
        assert (set(change.dropped.tolist()), set(change.loaded.tolist())) == oracle.step(needed)


EXAMPLES = {
    # room for three: unit 0 was used longest ago when 3 comes, then 1, since 2 was used again
    Lru(5, rows=3): [({0, 1}, [], [0, 1]), ({2}, [], [2]), ({3}, [0], [3]), ({2}, [], []), ({4}, [1], [4])],
    # room for two: 0 was used twice and stays, although 1 was used later; 2 goes for 1, whose count is then 2
    Lfu(3, rows=2): [({0}, [], [0]), ({0}, [], []), ({1}, [], [1]), ({2}, [1], [2]), ({1}, [2], [1])],
    # room for two, counts halve with each token: 0 has 3/8 when 2 comes, although it was used twice, and 1 has 1/2
    Lrfu(3, rows=2, half_life=1): [({0}, [], [0]), ({0}, [], []), ({1}, [], [1]), ({2}, [0], [2])],
    # room for two: 0 came with every token but one, and stays; 1 and 2 pass
    Learned(4, rows=2): [*[({0}, [], [0])], *[({0}, [], [])] * 8, ({1}, [], [1]), ({2}, [1], [2]), ({0}, [], [])],
    # room for two: 3, the most frequent, stays; the others pass, even 1, which is used again at once
    Static(4, rows=2, frequency=np.array([0.2, 0.3, 0.1, 0.9])): [
        *(({3}, [], [3]), ({1}, [], [1]), ({0}, [1], [0]), ({1}, [0], [1]), ({3}, [], [])),
    ],
    # room for two: unit 0 was used twice, so 1 goes for 2, although it was used later; then 2, whose state is 4
    HotTable(4, rows=2): [({0}, [], [0]), ({0}, [], []), ({1}, [], [1]), ({2}, [1], [2]), ({3}, [2], [3])],
    # room for two: 1 goes for 2, since 0 is needed sooner; at the end nothing is needed again
    Belady(3, rows=2, future=arrays([{0}, {1}, {2}, {0}, {1}])): [
        *(({0}, [], [0]), ({1}, [], [1]), ({2}, [1], [2]), ({0}, [], []), ({1}, [0], [1])),
    ],
    # what neither this token nor the one before it used goes
    SlidingWindow(units=6, tokens=2): [
        *(({0, 1, 2}, [], [0, 1, 2]), ({1, 3}, [], [3]), ({1, 4}, [0, 2], [4]), ({0, 3}, [], [0]), (set(), [1, 4], [])),
    ],
    # memory holds 4: the third token leaves no room for all of the first one's, the fourth none for others
    SlidingWindow(units=9, tokens=3, rows=4): [
        *(({0, 1}, [], [0, 1]), ({1, 2}, [], [2]), ({3, 4}, [0], [3, 4])),
        *(({5, 6, 7, 8}, [1, 2, 3, 4], [5, 6, 7, 8]), ({5}, [], []), ({0}, [6, 7, 8], [0])),
    ],
}


@pytest.mark.parametrize("residency", EXAMPLES, ids=lambda residency: type(residency).__name__)
def test_worked_examples(residency):
    """Units that each token needs, and what then goes and comes."""
    for needed, dropped, loaded in EXAMPLES[residency]:
        assert changes(residency, [needed]) == [(dropped, loaded)]


def test_a_token_that_needs_more_than_memory_holds_changes_nothing():
    window = SlidingWindow(units=9, tokens=3, rows=4)
    changes(window, [{0}])
    with pytest.raises(UserError, match="one token needs 5 units, and memory holds 4: allow 5 or more"):
        window.step(np.arange(5))
    assert changes(window, [{0}]) == [([], [])]


def test_random_choices_repeat_with_the_seed():
    tokens = [{number % 7} for number in range(40)]
    first, again, other = (changes(RandomChoice(7, rows=3, seed=seed), tokens) for seed in (1, 1, 2))
    assert first == again != other


@settings(max_examples=60, deadline=None)
@given(tokens=TOKENS, rows=st.integers(3, UNITS))
def test_least_stale_is_lru_with_one_layer(tokens, rows):
    stale, lru = LeastStale(UNITS, rows), Lru(UNITS, rows)
    for needed in arrays(tokens):
        assert stale.step(needed).dropped.tolist() == lru.step(needed).dropped.tolist()


def test_least_stale_keeps_the_layers_that_come_next():
    """Three layers with one unit each in use, 0, 2 and 4, and room for two: LRU drops just what comes next.

    When 4 comes, layer 0 is next, so 2 goes; when 2 comes, 0 goes. So after three loads every second step is a hit, as
    with Belady. Unit 1 is of layer 0 and takes the place of 0, which missed a turn of its layer.
    """
    cycle = [{0}, {2}, {4}] * 6
    assert sum(len(new) for _, new in changes(Lru(6, 2), cycle)) == 18
    stale = LeastStale(6, 2, layers=3)
    assert changes(stale, cycle[:6]) == [([], [0]), ([], [2]), ([2], [4]), ([], []), ([0], [2]), ([], [])]
    assert sum(len(new) for _, new in changes(stale, cycle[6:])) == 6
    stale = LeastStale(6, 3, layers=3)
    assert changes(stale, [*cycle[:3], {1}])[3] == ([0], [1])


@pytest.mark.parametrize("name", RESIDENCIES)
@settings(max_examples=20, deadline=None)
@given(tokens=TOKENS, rows=st.integers(3, UNITS), data=st.data())
def test_admitted_units_evict_nothing_protected(name, tokens, rows, data):
    residency = make(name, tokens, rows)
    for needed in arrays(tokens):
        units = data.draw(st.lists(st.integers(0, UNITS - 1), max_size=6))
        before = residency.held.copy()
        change = residency.admit(units, protect=needed)
        assert not set(change.dropped.tolist()) & {*needed.tolist(), *units}
        assert before[change.dropped].all()
        assert not before[change.loaded].any()
        new = [unit for unit in dict.fromkeys(units) if not before[unit]]
        assert sorted(new[: len(change.loaded)]) == change.loaded.tolist()
        idle = set(np.flatnonzero(residency.held)) - {*needed.tolist(), *units}
        assert residency.held.sum() <= rows
        assert len(new) == len(change.loaded) or not idle
        assert len(change.dropped) == max(0, before.sum() + len(change.loaded) - rows)
        residency.step(needed)


def test_a_wrong_guess_goes_before_what_was_used():
    residency = Lru(5, rows=3)
    changes(residency, [{0}, {1}])
    assert residency.admit([4]).loaded.tolist() == [4]
    assert changes(residency, [{2}]) == [([4], [2])]
    assert residency.admit([3, 4], protect=[1, 2]).loaded.tolist() == [3]  # only 0 may go
    with pytest.raises(UserError, match="units 5 to 5: the layer has 0 to 4"):
        residency.admit([5])


@settings(max_examples=150, deadline=None)
@given(
    tokens=st.integers(1, 5),
    rows=st.integers(3, 12),
    actives=st.lists(st.sets(st.integers(0, 11), max_size=3), max_size=12),
)
def test_the_window_as_sets_say(tokens, rows, actives):
    window, oracle = SlidingWindow(12, tokens, rows), naive_activations.Window(tokens, rows)
    for active in actives:
        ((dropped, loaded),) = changes(window, [active])
        assert (set(dropped), set(loaded)) == oracle.step(active)
        held = set(np.flatnonzero(window.held).tolist())
        assert held == oracle.held
        assert active <= held
        assert len(held) <= rows

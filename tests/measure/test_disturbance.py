"""The guard of timed turns: counters made up, and a real busy process."""

import itertools
import os
import subprocess
import sys

import pandas as pd
import pytest

from tests.measure.test_turns import Toy
from toolkit.measure import disturbance
from toolkit.measure.disturbance import (
    LIMIT_CORES,
    WINDOW_S,
    Counters,
    Guard,
    count_disturbed,
    disturbance_words,
    disturbed_rows,
    load_between,
    read_counters,
    starred,
)
from toolkit.measure.turns import MOST_IN_VAIN, take_turns


@pytest.fixture(autouse=True)
def _as_it_is(monkeypatch):
    """Undoes what all other tests want."""
    monkeypatch.setattr(disturbance, "load_between", load_between)
    monkeypatch.setattr(disturbance, "WINDOW_S", WINDOW_S)


def readings(*counters):
    """A `read` that gives these counters one after the other."""
    return iter([Counters(*numbers) for numbers in counters]).__next__


def test_what_this_process_did_is_no_disturbance():
    load = load_between(Counters(10, 50, 7, 1), Counters(14, 57, 12, 2))
    assert (load.others_cores, load.stolen_cores) == ((7 - 5) / 4, 1 / 4)
    assert load.disturbed
    assert load_between(Counters(0, 0, 0), Counters(1, 0.98, 1)).columns() == {
        "others_cores": 0.0,
        "stolen_cores": 0.0,
        "disturbed": False,
    }


def test_a_long_turn_has_its_own_load_and_what_lies_between_turns_counts_for_none():
    guard = Guard(readings((0, 0, 0), (1, 2, 1), (5, 6, 1), (6, 7, 2)))
    with guard.turn() as first:
        pass
    with guard.turn() as second:
        pass
    assert (first.others_cores, second.others_cores) == (1.0, 0.0)


def test_short_turns_share_a_window():
    step = WINDOW_S / 2
    guard = Guard(readings((0, 0, 0), (step, 0, 0), (2 * step, step, 0), (9, 9, 9), (9 + step, 9, 9)))
    loads = []
    for _ in range(2):
        with guard.turn() as load:
            loads.append(load)
    assert [load.others_cores for load in loads] == [0.5, 0.5]
    with guard.turn() as last:
        pass
    assert last.others_cores != last.others_cores  # not known yet


def loads_of_rounds(monkeypatch, busy):
    """Every turn lasts a second; `busy` says how many cores others use, reading by reading, and then the last ever."""
    clock, rest = itertools.count(), list(busy)
    monkeypatch.setattr(disturbance, "read_counters", lambda: Counters(float(next(clock)), 0, 0))

    def load(start, end):
        return disturbance.Load(rest.pop(0) if len(rest) > 1 else rest[0], 0.0)

    monkeypatch.setattr(disturbance, "load_between", load)


def test_a_disturbed_repetition_is_taken_again_by_all(monkeypatch):
    loads_of_rounds(monkeypatch, [0, 0, 0, 0.9, 0, 0.1, 0])
    events = []
    spans = take_turns([Toy("a", events), Toy("b", events)], repetitions=3)
    assert [event[0] for event in events if event.endswith("opens")] == [*"abbaab", *"ba"]
    assert not spans["disturbed"].any()
    assert spans["repetition"].tolist() == [1, 1, 2, 2, 3, 3]
    assert spans["others_cores"].tolist() == [0, 0, 0, 0, 0, 0.1]


@pytest.mark.parametrize(("repetitions", "taken"), [(1, 2), (5, 5 + MOST_IN_VAIN)])
def test_a_busy_machine_ends_it_and_what_stays_is_marked(monkeypatch, repetitions, taken):
    loads_of_rounds(monkeypatch, [0.9])
    events = []
    spans = take_turns([Toy("a", events)], repetitions=repetitions)
    assert events.count("a opens") == taken
    assert spans["disturbed"].all()
    assert len(spans) == repetitions


def test_the_less_disturbed_of_two_counts(monkeypatch):
    loads_of_rounds(monkeypatch, [0.4, 0.9])
    spans = take_turns([Toy("a", [])], repetitions=1)
    assert spans["others_cores"].tolist() == [0.4]
    assert spans["disturbed"].all()


def test_a_row_is_marked_when_half_of_its_turns_were_disturbed():
    table = pd.DataFrame(
        {
            "way": ["a", "a", "b", "c", "d"],
            "disturbed": [0.4, 0.5, 0.0, True, None],
            "evidence": ["measured", "measured", "measured", "modelled", "measured"],
        }
    )
    assert disturbed_rows(table).tolist() == [False, True, False, False, False]
    assert starred(table, "way").tolist() == ["a *", "a *", "b", "c", "d"]
    assert count_disturbed(table) == (1, 3)
    assert disturbance_words(1, 3) == "1 of 3 measured rows was disturbed by other work"
    bare = table.drop(columns="disturbed")
    assert count_disturbed(bare) == (0, 0)
    assert starred(bare, "way").tolist() == [*"aabcd"]


def test_the_counters_see_a_busy_process_of_others_and_not_our_own():
    """The kernel's numbers, not a timing: CPU seconds of a process that works for some time, started by another."""
    spin = "import time\nend = time.process_time() + 0.6\nwhile time.process_time() < end: pass"
    before = read_counters()
    subprocess.run([sys.executable, "-c", spin], check=True)
    after = read_counters()
    assert after.own_s - before.own_s >= 0.6
    orphan = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {spin!r}], close_fds=False)"
    before = read_counters()
    reader, writer = os.pipe()  # the orphan holds it open until it ends
    subprocess.run([sys.executable, "-c", orphan], check=True, pass_fds=[writer])
    os.close(writer)
    os.read(reader, 1)
    os.close(reader)
    after = read_counters()
    others_s = (after.busy_s - before.busy_s) - (after.own_s - before.own_s)
    assert others_s > 2 * LIMIT_CORES

"""Turns of contestants whose clocks are worked out by hand."""

from contextlib import contextmanager

import pytest

from toolkit.errors import UserError
from toolkit.measure.contestant import Contestant
from toolkit.measure.turns import median_repetition, take_turns
from toolkit.timeline.spans import Recorder


class Toy(Contestant):
    """Token n of a turn reads for n + 1 seconds; each preparation takes 100 s. Writes down what is called."""

    nbytes, mode, memory = 8, "direct", 64

    def __init__(self, name, events):
        self.name, self.events, self.labels, self.clock_s = name, events, {"method": name}, 0.0
        self.recorder = Recorder(lambda: self.clock_s)

    @contextmanager
    def open(self):
        self.events.append(f"{self.name} opens")
        yield
        self.events.append(f"{self.name} closes")

    def prepare(self):
        self.clock_s += 100

    def token(self, number):
        begun_s = self.clock_s
        self.clock_s += number + 1
        self.recorder.record("read", "all", "storage", begun_s, 8, None)
        self.events.append(f"{self.name} {number}")

    def check(self, number, output):
        self.events.append(f"{self.name} checked")


def test_only_tokens_that_count_are_timed_and_nothing_between_them():
    spans = take_turns([Toy("a", [])], repetitions=2, tokens=2, skipped=1, warm_up=1)
    assert spans[["repetition", "token"]].to_numpy().tolist() == [[1, 1], [1, 2], [2, 1], [2, 2]]
    assert spans[["start_s", "end_s"]].to_numpy().tolist() == [[0, 2], [2, 5]] * 2
    constants = spans[["method", "stage", "tokens", "stored_bytes", "memory_bytes", "mode"]].drop_duplicates()
    assert constants.to_numpy().tolist() == [["a", "read", 2, 8, 64, "direct"]]
    assert median_repetition(spans) == 1


def test_each_repetition_begins_with_the_next_contestant():
    events = []
    take_turns([Toy(name, events) for name in "abc"], repetitions=4)
    assert [event[0] for event in events if event.endswith("opens")] == [*"abc", *"bca", *"cab", *"abc"]


@pytest.mark.parametrize("stay_open", [False, True])
def test_a_turn_opens_and_closes_unless_contestants_stay_open(stay_open):
    events = []
    take_turns([Toy("a", events)], repetitions=2, stay_open=stay_open)
    between = ["a 0", "a checked"] if stay_open else ["a closes", "a checked", "a opens", "a 0"]
    expected = ["a opens", "a 0", *(["a checked", *between] if stay_open else between)]
    assert events == [*expected, "a closes"] + ([] if stay_open else ["a checked"])


def test_a_contestant_without_a_recorder_is_one_span():
    class Plain(Contestant):
        nbytes = 3

        def token(self, number):
            return number

    spans = take_turns([Plain()], repetitions=1, tokens=2)
    assert spans[["stage", "tier", "nbytes"]].drop_duplicates().to_numpy().tolist() == [["compute", "dram", 3]]
    assert (spans["end_s"] > spans["start_s"]).all()


def test_no_turn_is_refused():
    with pytest.raises(UserError, match="repetitions=0, tokens=1: expected 1 or more of each"):
        take_turns([Toy("a", [])], repetitions=0)

"""Turns of contestants whose clocks are worked out by hand."""

from contextlib import contextmanager

import pytest
import torch

from toolkit.errors import UserError
from toolkit.measure.contestant import Contestant, Reference
from toolkit.measure.turns import take_turns
from toolkit.timeline import Recorder


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


def test_each_repetition_begins_with_the_next_contestant():
    events = []
    spans = take_turns([Toy(name, events) for name in "abc"], repetitions=4)
    assert [event[0] for event in events if event.endswith("opens")] == [*"abc", *"bca", *"cab", *"abc"]
    assert spans["method"].tolist() == [*"abc"] * 4


@pytest.mark.parametrize("stay_open", [False, True])
def test_a_turn_opens_and_closes_unless_contestants_stay_open(stay_open):
    events = []
    take_turns([Toy("a", events)], repetitions=2, stay_open=stay_open)
    between = ["a 0", "a checked"] if stay_open else ["a closes", "a checked", "a opens", "a 0"]
    expected = ["a opens", "a 0", *(["a checked", *between] if stay_open else between)]
    assert events == [*expected, "a closes"] + ([] if stay_open else ["a checked"])


class Adder(Contestant):
    """Gives the number of the token, and 1 more in the turn named `wrong`."""

    def __init__(self, name, wrong=None):
        self.name, self.labels, self.wrong, self.begun = name, {"method": name}, wrong, -1
        self.reference = Reference("the sum", [torch.tensor(0.0), torch.tensor(1.0)])

    def token(self, number):
        self.begun += number == 0
        return torch.tensor(float(number + (self.begun == self.wrong and number == 1)))


def test_every_token_of_every_turn_is_checked():
    """Turn 0 warms up, and the wrong contestant is the second of two."""
    take_turns([Adder("right"), Adder("rival")], repetitions=2, tokens=2, warm_up=1)
    for wrong in (0, 2):
        with pytest.raises(UserError, match="rival gives another output than the sum: not timed"):
            take_turns([Adder("right"), Adder("rival", wrong)], repetitions=2, tokens=2, warm_up=1)


def test_packed_products_may_differ_by_rounding_and_no_more():
    expected = torch.tensor([[1.0, -2.0]])
    reference = Reference("the model in memory", [expected], tolerance=0.02)
    reference.check("endor_packed", 0, expected + 0.03, exact=False)
    for name, off, exact in (("endor_packed", 0.06, False), ("endor", 1e-6, True)):
        with pytest.raises(UserError, match=f"{name} gives another output than the model in memory"):
            reference.check(name, 0, expected + off, exact)


def test_the_first_output_is_the_reference_where_there_is_no_other():
    reference = Reference("the others")
    reference.check("a", 0, torch.ones(2))
    reference.check("b", 1, torch.zeros(2))
    for number, output in ((0, torch.zeros(2)), (1, torch.ones(2))):
        with pytest.raises(UserError, match="c gives another output than the others"):
            reference.check("c", number, output)

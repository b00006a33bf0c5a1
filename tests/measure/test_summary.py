"""Turns and their summary, worked out by hand."""

import math

import pandas as pd
import pytest

from tests.measure.test_turns import Toy
from toolkit.measure.summary import by_turn, summary, times_as_fast
from toolkit.measure.turns import take_turns
from toolkit.timeline import Span, Timeline

ABOUT = {"method": "a", "repetition": 1, "stored_bytes": 20, "memory_bytes": 1.0, "mode": "direct"}
ABOUT |= {"disturbed": False, "measured_at": "now"}


def test_a_row_a_turn():
    """Tokens 1 and 2 take 2 and 3 s and read 8 bytes each."""
    spans = take_turns([Toy(name, []) for name in "ba"], repetitions=2, tokens=2, skipped=1)
    turns = by_turn(spans, ["method"])
    assert turns[["method", "repetition"]].to_numpy().tolist() == [["b", 1], ["a", 1], ["b", 2], ["a", 2]]
    numbers = ["seconds", "tokens_per_s", "read_bytes", "read_s", "compute_s", "stored_bytes", "mode", "disturbed"]
    assert turns[numbers].drop_duplicates().to_numpy().tolist() == [[2.5, 0.4, 8, 2.5, 0, 8, "direct", False]]


@pytest.mark.parametrize("tokens", [1, 4])
def test_a_pipelines_window_has_the_reads_of_its_tokens(tokens):
    """Two layers of 10 bytes are read in 1 s each while the one before is used; the window begins with a token."""
    reads = [Span("read", "layer", "storage", start, start + 1, 10) for start in range(2 * tokens + 4)]
    products = [Span("compute", "fc1", "dram", start + 1, start + 2, 10) for start in range(2 * tokens + 2)]
    window = Timeline((*reads, *products), "measured").window(3, 3 + 2 * tokens)
    spans = window.table().assign(token=lambda table: (table["start_s"] // 2).astype(int), **ABOUT)
    assert by_turn(spans, ["method"]).loc[0, ["seconds", "read_bytes"]].tolist() == [2, 20]


def test_reads_that_the_window_cuts_count_in_proportion():
    """The window has half of a read of 10 bytes in 2 s, a third of one of 21 bytes in 3 s, and a whole read of 8."""
    reads = [Span("read", "a", "storage", 0, 2, 10, 0), Span("read", "b", "storage", 2, 4, 8, 0)]
    reads += [Span("read", "c", "storage", 4, 7, 21, 0)]
    window = Timeline(tuple(reads), "measured").window(1, 5)
    spans = window.table().assign(token=[0, 1, 1], **ABOUT)
    assert by_turn(spans, ["method"]).loc[0, ["seconds", "read_bytes"]].tolist() == [2, (5 + 8 + 7) / 2]


SECONDS = {"csr": [1.0, 2.0, 4.0], "ptcsr": [2.0, 2.0, 3.0], "dense": [4.0, 6.0, 8.0]}


@pytest.fixture
def turns():
    return pd.DataFrame(
        {
            "op": "q",
            "kind": kind,
            "repetition": number,
            "seconds": value,
            "mode": f"mode {number}",
            "disturbed": number > 2,
        }
        for kind, values in SECONDS.items()
        for number, value in enumerate(values, 1)
    ).assign(disturbed=lambda table: table["repetition"] > 2)


def test_medians_and_ranges(turns):
    table = summary(turns, ["op", "kind"], over={"speedup": {"kind": "dense"}}).set_index("kind")
    assert list(table.index) == list(SECONDS)
    assert table.loc["csr", ["seconds", "seconds_low", "seconds_high"]].tolist() == [2, 1, 4]
    assert table.loc["csr", ["speedup", "speedup_low", "speedup_high"]].tolist() == [3, 2, 4]  # 4, 3, 2
    assert table["disturbed"].tolist() == pytest.approx([1 / 3] * 3)
    assert set(table["mode"]) == {"mode 1"}
    assert "repetition" not in table


def test_each_label_may_have_a_baseline_of_its_own(turns):
    ratio = times_as_fast(turns, ["op", "kind"], {"kind": {"csr": "ptcsr", "ptcsr": "csr"}})
    assert ratio.tolist()[:6] == [2, 1, 0.75, 0.5, 1, 4 / 3]
    assert all(math.isnan(value) for value in ratio[6:])

"""FLASH's tables of reads, from a handful of made-up tokens."""

import pandas as pd
import pytest

from toolkit.evidence.comparison import compare
from toolkit.evidence.run import outside_ranges
from toolkit.machines.hardware import profile
from toolkit.papers.flash import reads
from toolkit.papers.flash.cost_model import SCHEMES, Reads

SECONDS = {"naive": 1.0, "hybrid": 0.5, "predictor": 0.4, "windowing": 0.2, "bundling": 0.1}


@pytest.fixture
def spans():
    """Two turns of one token: the second takes twice as long, but for the naive way."""
    rows = []
    for way, seconds in SECONDS.items():
        for repetition in (1, 2):
            whole, start_s = seconds * (2 if repetition == 2 and way != "naive" else 1), 0.0
            predicted = SCHEMES[way].predicted
            parts = [("read", "neurons", 0.5), ("manage" if predicted else "other", "neurons", 0.2)]
            parts += [("compute", "predictor" if predicted else "attention", 0.1), ("compute", "ffn", 0.2)]
            for stage, op, share in parts:
                span = {"stage": stage, "op": op, "start_s": start_s, "end_s": start_s + share * whole}
                span |= {"seconds": share * whole}
                nbytes = round(2e9 * seconds) if stage == "read" else 0
                rows.append({"way": way, "repetition": repetition, "nbytes": nbytes} | span)
                start_s += share * whole
    about = {"token": 0, "tokens": 1, "tier": "storage", "layer": 0, "model": "opt-6.7b", "layers": 3, "mode": "direct"}
    about |= {"stored_bytes": 0, "memory_bytes": float("inf"), "held_bytes": 1e9, "measured_at": "now"}
    table = pd.DataFrame(rows).assign(**about, disturbed=lambda table: table["repetition"] == 1)
    return table.assign(predictor_bytes=table["way"].map(lambda way: 1e8 * SCHEMES[way].predicted))


def test_medians_and_speedups_by_hand(spans):
    rows = reads.measured_ways(spans).set_index("way")
    assert list(rows.index) == list(SCHEMES)
    last = rows.loc["bundling"]
    assert last[["total_ms", "io_ms", "manage_ms", "compute_ms"]].tolist() == pytest.approx([150, 75, 30, 45])
    assert last[["speedup", "speedup_low", "speedup_high"]].tolist() == pytest.approx([7.5, 5, 10])
    assert last[["over_hybrid", "over_hybrid_low", "over_hybrid_high"]].tolist() == pytest.approx([5, 5, 5])
    assert last[["predictor_ms", "predictor_gb"]].tolist() == pytest.approx([15, 0.1])
    assert last["disturbed"] == 0.5
    assert last["tokens_per_s"] == pytest.approx((1 / 0.1 + 1 / 0.2) / 2)
    assert rows.loc["naive", "read_gb"] == 2
    assert rows.loc["naive", "manage_ms"] != rows.loc["naive", "manage_ms"]  # there is none


def test_no_value_lies_outside_its_range(spans):
    """Turns that differ most: the ratio of two medians lay outside the ratios of the turns."""
    slow = (spans["repetition"] == 2) == (spans["way"] == "naive")
    times = ["start_s", "end_s", "seconds"]
    spans.loc[slow, times] *= 5
    third = spans.assign(repetition=3, **2 * spans[times])
    assert outside_ranges(reads.measured_ways(pd.concat([spans, third]))) == []


def test_the_papers_reads_are_predicted_within_a_fifth():
    """The goal of the cost model on table 2, whose times follow from the inputs of the profile."""
    table = reads.modelled_reads(profile("flash-m1-max"), Reads("opt-6.7b", 32))
    comparison = compare(table, "flash/tab02")
    chosen = comparison[comparison["kind"].eq("arithmetic") & comparison["claim"].str.endswith("-io")]
    assert len(chosen) == 4
    assert (chosen["ratio"].astype(float) - 1).abs().max() < 0.2

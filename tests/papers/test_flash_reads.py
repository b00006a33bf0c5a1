"""FLASH's tables of reads, from a handful of made-up tokens."""

import pandas as pd
import pytest
from matplotlib import pyplot as plt

from toolkit.evidence.comparison import compare
from toolkit.evidence.run import outside_ranges
from toolkit.machines.hardware import profile
from toolkit.papers.flash import reads
from toolkit.policies.neuron_ways import WAYS
from toolkit.simulation.neuron_reads import Reads

SECONDS = {"naive": 1.0, "hybrid": 0.5, "predictor": 0.4, "windowing": 0.2, "bundling": 0.1}


@pytest.fixture
def tokens():
    """Two repetitions of one token: the second takes twice as long, but for the naive way."""
    rows = []
    for way, seconds in SECONDS.items():
        for repetition in (1, 2):
            whole = seconds * (2 if repetition == 2 and way != "naive" else 1)
            stages = {"read": 0.5 * whole, "compute": 0.3 * whole, "total": whole}
            if WAYS[way].predicted:
                stages["manage"] = 0.2 * whole
            for stage, value in stages.items():
                row = {"way": way, "repetition": repetition, "token": 0, "stage": stage, "seconds": value}
                predictor = {"predictor_bytes": 1e8, "predictor_s": 0.1 * whole} if WAYS[way].predicted else {}
                row |= {"predictor_bytes": 0, "predictor_s": 0.0} | predictor
                rows.append(row | {"nbytes": 2e9 * seconds, "memory_bytes": 1e9})
    return pd.DataFrame(rows).assign(
        model="opt-6.7b", layers=3, mode="direct", disturbed=lambda table: table["repetition"] == 1
    )


def test_medians_and_speedups_by_hand(tokens):
    rows = reads.measured_ways(tokens).set_index("way")
    assert list(rows.index) == list(WAYS)
    last = rows.loc["bundling"]
    assert last[["total_ms", "io_ms", "manage_ms", "compute_ms"]].tolist() == pytest.approx([150, 75, 30, 45])
    assert last[["speedup", "speedup_low", "speedup_high"]].tolist() == pytest.approx([7.5, 5, 10])
    assert last[["over_hybrid", "over_hybrid_low", "over_hybrid_high"]].tolist() == pytest.approx([5, 5, 5])
    assert last[["predictor_ms", "predictor_gb"]].tolist() == pytest.approx([15, 0.1])
    assert last["disturbed"] == 0.5
    assert last["tokens_per_s"] == pytest.approx(1 / 0.15)
    assert rows.loc["naive", "read_gb"] == 2
    assert rows.loc["naive", "manage_ms"] != rows.loc["naive", "manage_ms"]  # there is none


def test_no_value_lies_outside_its_range(tokens):
    """Repetitions that differ most: the ratio of two medians lay outside the ratios of the repetitions."""
    slow = tokens["repetition"].eq(2) & tokens["way"].eq("naive") | tokens["repetition"].eq(1) & tokens["way"].ne(
        "naive"
    )
    tokens.loc[slow, "seconds"] *= 5
    rows = reads.measured_ways(pd.concat([tokens, tokens.assign(repetition=3, seconds=tokens["seconds"] * 2)]))
    assert outside_ranges(rows) == []
    assert {"total_ms_low", "speedup_low", "over_hybrid_low"} <= set(rows)


def test_the_papers_reads_are_predicted_within_a_fifth():
    """The goal of the cost model on table 2, whose times follow from the inputs of the profile."""
    table = reads.modelled_reads(profile("flash-m1-max"), Reads("opt-6.7b", 32))
    comparison = compare(table, "flash/tab02")
    chosen = comparison[comparison["kind"].eq("arithmetic") & comparison["claim"].str.endswith("-io")]
    assert len(chosen) == 4
    assert (chosen["ratio"].astype(float) - 1).abs().max() < 0.2


def test_a_bar_is_as_long_as_its_token_and_hides_no_reads():
    """12 ms of a token are products, 3 memory management; of 20 ms of reads 10 were waited for."""
    rows = pd.DataFrame({"way": ["all"], "io_ms": [20.0], "manage_ms": [3.0], "compute_ms": [12.0], "total_ms": [25.0]})
    rows = rows.assign(total_ms_low=24.0, total_ms_high=27.0, model="toy", layers=3.0)
    figure, axes = plt.subplots()
    reads.stage_bars(axes, rows)
    assert [bar.get_width() for bar in axes.patches] == [12, 3, 10]
    assert axes.get_title(loc="left") + axes.get_title() == "this machine, 3 layers of toy"
    plt.close(figure)

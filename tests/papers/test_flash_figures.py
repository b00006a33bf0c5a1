"""FLASH's single techniques, from made-up measurements and by hand."""

import pandas as pd
import pytest
from matplotlib import pyplot as plt

from toolkit.evidence.comparison import compare
from toolkit.machines.hardware import profile
from toolkit.measure.replay import Replay
from toolkit.measure.rewriting import MANAGER, REALLOCATION
from toolkit.papers import flash_figures as study
from toolkit.papers import flash_rivals

BASE = Replay("opt-6.7b", 3)


@pytest.fixture
def turns():
    rates = {("toolkit", "split"): (1.0, 2.0), ("toolkit", "bundled"): (1.5, 4.0), ("fio", "bundled"): (2.0, 4.0)}
    rates |= {("toolkit, long bursts", layout): (2.0, 3.0) for layout in ("bundled", "split")}
    return pd.DataFrame(
        {"tool": tool, "layout": layout, "repetition": turn, "gb_s": found[turn], "model": "opt-6.7b", "depth": 32}
        | {"chunk_bytes": 16384 if layout == "bundled" else 8192, "mode": "direct"}
        for (tool, layout), found in rates.items()
        for turn in (0, 1)
    )


def test_ratios_are_of_the_same_turn(turns):
    found = study.turn_ratios(turns)
    assert found["bundling"] == 1.75
    assert found["bundled, a layer's burst"] == found["bundled, long bursts"] == 0.875
    assert all(found[f"split, {burst}"] != found[f"split, {burst}"] for burst in ("a layer's burst", "long bursts"))
    assert study.turn_ratios(turns[turns["tool"] != "fio"])["bundling"] == 1.75


def test_chunks_and_the_inputs_of_the_profile_are_the_papers(turns):
    rates = study.measured_throughput(turns)
    modelled = study.modelled_throughput(profile("flash-m1-max"), rates)
    table = pd.concat([rates, modelled, study.chunk_sizes()], ignore_index=True)
    comparison = compare(table, "flash/fig05").set_index("claim")
    assert set(comparison["verdict"]) == {"within tolerance"}
    assert comparison.loc["fig05-falcon-chunk", "ours"] == 35.5
    plt.close(study.throughput_figure(pd.concat([rates, modelled])))


def test_rows_rewritten_by_hand():
    rows = [
        {"way": way, "window": window, "neurons": 1000, "held": 200, "changed": 24, "row_bytes": 1000}
        | {"rewritten": rewritten, "seconds": seconds, "model": "opt-6.7b"}
        for window in (1, 4)
        for way, rewritten, seconds in ((MANAGER, 20, 0.001), (REALLOCATION, 176, 0.004))
    ]
    table = study.rewritten(pd.DataFrame(rows))
    last = table.set_index(["way", "window"]).loc[(REALLOCATION, 4)]
    assert last[["rewritten_mb", "ms", "held_share", "rewritten_share"]].tolist() == pytest.approx(
        [0.176, 4, 0.2, 17.6]
    )
    words = study.rewriting_words(table)
    assert "with a window of 4 (20% of the neurons in memory) swapping rewrites 0.0 MB in 1.0 ms a layer" in words
    assert "where 24 rows go, and reallocation 0.2 MB in 4.0 ms" in words
    plt.close(study.rewriting_figure(table))


def test_windows_share_one_law():
    """Each window's own fit finds the persistence that the first one has; the wider, the fewer neurons are new."""
    runs = [study.for_window(BASE, window, 5) for window in (1, 4, 8)]
    assert [run.window for run in runs] == [1, 4, 8]
    assert runs[1].new == pytest.approx(BASE.new, rel=1e-3)
    assert runs[0].new > runs[1].new > runs[2].new
    table = study.modelled_windows(profile("flash-m1-max"), BASE, (1, 4, 8), 32)
    assert table["io_ms"].is_monotonic_decreasing
    assert table["memory_gb"].is_monotonic_increasing
    plt.close(study.trade_off_figure(table, {"flash-m1-max": 12.9}))
    assert "flash-m1-max (modelled): a window of 8 instead of 1 takes reading from" in study.window_words(table)


def test_the_parts_in_memory_are_the_papers():
    parts = study.memory_shares("opt-6.7b", 32, 0.24).set_index("quantity")["percent"]
    expected = {"ffn, whole": 64.62, "attention": 32.3, "embeddings": 3, "predictor": 1.25, "ffn": 15.5, "total": 52.1}
    for name, percent in expected.items():
        assert parts[name] == pytest.approx(percent, rel=0.1, abs=0.3), name
    assert study.held_share(BASE) == pytest.approx(0.21, abs=0.01)


def test_rivals_beside_ours():
    ours = pd.DataFrame({"way": ["naive", "bundling"], "total_ms": [100.0, 10.0]})
    theirs = pd.DataFrame({"way": ["llama.cpp F16", "llama.cpp Q4_0"], "total_ms": [80.0, 8.0]})
    ends = {"total_ms_low": 1.0, "total_ms_high": 2.0, "model": "toy", "layers": 3}
    table = flash_rivals.beside_rivals(ours.assign(**ends), theirs.assign(**ends))
    assert table.set_index("way")["over_rival"].to_dict() == {
        "naive": 10, "bundling": 1, "llama.cpp F16": 8, "llama.cpp Q4_0": 0.8
    }  # fmt: skip
    words = flash_rivals.rival_words(table)
    assert "naive 10.0, llama.cpp F16 8.0, llama.cpp Q4_0 0.8. Quicker than fewer neurons: llama.cpp Q4_0." in words
    plt.close(flash_rivals.rival_figure(table))

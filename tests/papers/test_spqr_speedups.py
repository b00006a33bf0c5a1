"""SpQR's speed-ups, limits and rooflines, on times made by hand."""

import matplotlib.pyplot as plt
import pandas as pd
import pytest

from toolkit.evidence.comparison import compare_machines
from toolkit.machines.hardware import profile
from toolkit.machines.machine import Memory
from toolkit.measure.products import FEW, MANY, READ
from toolkit.papers.headlines import product_headline
from toolkit.papers.spqr.figures import draw_bars, draw_published
from toolkit.papers.spqr.speedups import (
    CSR,
    DENSE,
    MEAN,
    PTCSR,
    QUICKER,
    mean_row,
    measured_limits,
    measured_speedups,
    modelled_speedups,
    roofline_sentence,
    stored_bits,
)

SECONDS = {
    "q_proj": {DENSE: [4, 4, 4], CSR: [1, 2, 1], PTCSR: [2, 2, 2]},
    "down_proj": {DENSE: [8, 8, 8], CSR: [4, 4, 4], PTCSR: [2, 2, 2]},
}
EVERY = {READ: [8, 8, 8], FEW: [1, 1, 1], MANY: [3, 3, 3]}
NBYTES = {DENSE: 512, CSR: 128, PTCSR: 160, READ: 1024, FEW: 8, MANY: 24}


@pytest.fixture
def seconds():
    return pd.DataFrame(
        {"op": op, "contestant": name, "repetition": number, "seconds": float(value), "nbytes": NBYTES[name]}
        for op, contestants in SECONDS.items()
        for name, values in (contestants | EVERY).items()
        for number, value in enumerate(values, 1)
    ).assign(rows=16, columns=16, threads=2)


@pytest.fixture
def measured(seconds):
    return measured_speedups(seconds)


def row(table, op, contestant):
    (found,) = table[table["op"].eq(op) & table["contestant"].eq(contestant)].to_dict("records")
    return found


def test_ratios_are_those_of_one_repetition(measured):
    csr = row(measured, "q_proj", CSR)
    assert (csr["seconds"], csr["low_s"], csr["high_s"]) == (1, 1, 1.5)  # of 1, 2, 1
    assert (csr["speedup_low"], csr["speedup"], csr["speedup_high"]) == (3, 4, 4)  # of 4, 2, 4
    assert (csr["over_other"], row(measured, "q_proj", PTCSR)["over_other"]) == (2, 0.5)
    assert (csr["byte_limit"], csr["bits_per_weight"]) == (4, 4)
    assert csr["share_of_read"] == pytest.approx(1)  # 128 bytes in 1 s, as 1024 in 8 s


def test_means_are_geometric_and_the_quicker_is_chosen_for_each_operation(measured):
    assert row(measured, MEAN, CSR)["speedup"] == pytest.approx((4 * 2) ** 0.5)
    assert [row(measured, op, QUICKER)["speedup"] for op in SECONDS] == [4, 4]
    assert [row(measured, op, QUICKER)["nbytes"] for op in SECONDS] == [128, 160]
    assert row(measured, MEAN, QUICKER)["byte_limit"] == pytest.approx((4 * 3.2) ** 0.5)


def test_a_baseline_of_another_name_and_no_storages(seconds):
    found = measured_speedups(seconds[seconds["contestant"] != PTCSR], CSR)
    assert row(found, "down_proj", DENSE)["speedup"] == 0.5
    assert QUICKER not in set(found["contestant"])


def test_limits_by_hand(seconds):
    limits = measured_limits(seconds)
    csr = row(limits, "q_proj", CSR)
    assert csr["bytes_s"] == 1  # 128 bytes at 128 bytes a second
    # two words take 2 s longer than none; 16 words, two threads
    assert (csr["word_ns"], csr["instructions_s"], csr["bound"]) == (1e9, 8, "instructions")
    quick = seconds.assign(seconds=seconds["seconds"].where(seconds["contestant"] != MANY, 1.1))
    assert set(measured_limits(quick)["bound"]) == {"bytes"}


def test_a_roofline_by_hand():
    """Bytes: 4096² weights of 4 bits at 1 GB/s. Operations: four a weight where it is dequantised."""
    slow, weak = Memory("slow", 1e9, 1.0, {"fp32": 100}), Memory("weak", 1e9, 1e6, {"fp32": 0.001})
    bits = {("q_proj", DENSE): 16.0, ("q_proj", CSR): 4.0, ("q_proj", PTCSR): 5.0}
    table = modelled_speedups(bits, "llama2-7b", {"slow": slow, "weak": weak})
    found = table[table["contestant"].eq(CSR) & table["op"].eq("q_proj")].set_index("profile")
    assert found["seconds"].to_dict() == pytest.approx({"slow": 4096**2 / 2 / 1e9, "weak": 4 * 4096**2 / 1e9})
    assert found["limit"].to_dict() == {"slow": "memory", "weak": "compute"}
    assert found["speedup"].to_dict() == pytest.approx({"slow": 4, "weak": 0.5})
    means = table[table["op"] == MEAN].set_index(["profile", "contestant"])
    assert means["speedup"]["slow", QUICKER] == pytest.approx(4)
    assert means["over_other"]["slow", CSR] == pytest.approx(5 / 4)


def test_claims_find_their_rows_and_figures_are_drawn(measured):
    bits, machine = stored_bits(measured), "spqr-a100"
    modelled = modelled_speedups(bits, "llama2-7b", {machine: profile(machine).device})
    table = pd.concat([modelled, measured])
    comparison = compare_machines(table, "spqr/fig4_1")
    ours = comparison[comparison["profile"] == machine].set_index("claim")["ours"]
    assert ours["fig4_1-csr"] == pytest.approx(4)
    assert ours.notna().all()
    figure, (left, right) = plt.subplots(1, 2)
    draw_bars(left, measured, "speedup", [CSR, PTCSR])
    draw_published(right, comparison)
    assert left.patches
    assert right.patches
    plt.close(figure)
    assert roofline_sentence(measured) == ""
    assert roofline_sentence(table).startswith(f"Bytes and peaks alone allow (modelled): {machine} 4.00 (spqr, csr), ")
    assert mean_row(measured, CSR)["speedup"] == pytest.approx(8**0.5)


def test_the_headline_says_what_the_bytes_would_allow(measured):
    rival = row(measured, MEAN, CSR) | {"contestant": "int8", "speedup": 9.0}
    found = product_headline(pd.concat([measured, pd.DataFrame([rival])]), "toy")
    assert found["gain"] == (
        "Weights of 4.0 bits, outliers included, are multiplied 2.83 times as fast as torch's dense bf16 "
        "(toy, measured)."
    )
    assert "at 62% of the rate of reads" in found["negative"]
    assert "int8 with more bytes is faster" in found["negative"]
    assert product_headline(measured[measured["contestant"] == DENSE], "toy") == {}

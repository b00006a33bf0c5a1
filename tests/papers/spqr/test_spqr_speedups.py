"""SpQR's speed-ups, limits and the cost model of its kernel, on times made by hand."""

from dataclasses import replace

import pandas as pd
import pytest

from tests.notebook_code import functions_of
from toolkit.machines.hardware import profile
from toolkit.machines.machine import Memory, Profile, Software
from toolkit.models.shapes import twin_shapes
from toolkit.papers.spqr.products import FEW, MANY, READ
from toolkit.papers.spqr.speedups import (
    CSR,
    DENSE,
    MEAN,
    PTCSR,
    QUICKER,
    mean_row,
    measured_speedups,
    modelled_speedups,
    product_s,
    without_kernels,
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
    ).assign(rows=16, columns=16, threads=2, disturbed=lambda table: table["repetition"] == 1)


@pytest.fixture
def measured(seconds):
    return measured_speedups(seconds)


def row(table, op, contestant):
    (found,) = table[table["op"].eq(op) & table["contestant"].eq(contestant)].to_dict("records")
    return found


def test_ratios_are_those_of_one_repetition(measured):
    csr = row(measured, "q_proj", CSR)
    assert (csr["seconds"], csr["seconds_low"], csr["seconds_high"]) == (1, 1, 2)  # of 1, 2, 1
    assert (csr["speedup_low"], csr["speedup"], csr["speedup_high"]) == (2, 4, 4)  # of 4, 2, 4
    assert (csr["over_other"], row(measured, "q_proj", PTCSR)["over_other"]) == (2, 0.5)
    assert (csr["byte_limit"], csr["bits_per_weight"]) == (4, 4)
    assert csr["share_of_read"] == pytest.approx(1)  # 128 bytes in 1 s, as 1024 in 8 s


def test_means_are_geometric_and_the_quicker_is_chosen_for_each_operation(measured):
    assert row(measured, MEAN, CSR)["speedup"] == pytest.approx((4 * 2) ** 0.5)
    assert [row(measured, op, QUICKER)["speedup"] for op in SECONDS] == [4, 4]
    assert [row(measured, op, QUICKER)["nbytes"] for op in SECONDS] == [128, 160]
    assert row(measured, MEAN, QUICKER)["byte_limit"] == pytest.approx((4 * 3.2) ** 0.5)


def test_limits_by_hand(seconds):
    limits = functions_of("spqr/fig4_1").measured_limits(seconds)
    csr = row(limits, "q_proj", CSR)
    assert csr["bytes_s"] == 1  # 128 bytes at 128 bytes a second
    # two words take 2 s longer than none; 16 words, two threads
    assert (csr["word_ns"], csr["instructions_s"], csr["bound"]) == (1e9, 8, "instructions")
    quick = seconds.assign(seconds=seconds["seconds"].where(seconds["contestant"] != MANY, 1.1))
    assert set(functions_of("spqr/fig4_1").measured_limits(quick)["bound"]) == {"bytes"}


KERNELS = Software("kernels", launch_s=1e-3, bandwidth_share=0.5, word_cycles=2)
GPU = Profile("gpu", "by hand", None, device=Memory("memory", 1e9, 1.0, sm_ghz=0.01), software=KERNELS)


def test_a_product_takes_a_launch_and_its_bytes_or_cycles():
    """62,500 words of two cycles at 0.01 GHz are 12.5 ms, their bytes 1 ms; without kernels there are bytes alone."""
    quick = replace(GPU, software=replace(KERNELS, word_cycles=0.1))
    (bare,) = without_kernels({"gpu": GPU}).values()
    assert product_s(GPU, 1e6, 16) == pytest.approx(1e-3 + 2e6 / 0.5e9)  # dense: no words
    assert product_s(GPU, 1e6, 4) == pytest.approx(1e-3 + 62500 * 2 / 0.01e9)
    assert product_s(quick, 1e6, 4) == pytest.approx(1e-3 + 0.5e6 / 0.5e9)
    assert product_s(bare, 1e6, 4) == pytest.approx(0.5e6 / 1e9)


def test_speedups_on_another_machine_by_hand():
    """Bytes over 1 GB/s. Dense has 16 bits there, though this machine multiplied 32."""
    bits = {("q_proj", DENSE): 32.0, ("q_proj", CSR): 4.0, ("q_proj", PTCSR): 5.0}
    table = modelled_speedups(bits, "llama2-7b", without_kernels({"gpu": GPU}))
    found = table[table["op"].eq("q_proj")].set_index("contestant")
    assert found.loc[CSR, "seconds"] == pytest.approx(4096**2 / 2 / 1e9)
    assert found["speedup"].to_dict() == pytest.approx({DENSE: 1, CSR: 4, PTCSR: 3.2, QUICKER: 4})
    means = table[table["op"] == MEAN].set_index("contestant")
    assert means.loc[QUICKER, "speedup"] == pytest.approx(4)
    assert means.loc[CSR, "over_other"] == pytest.approx(5 / 4)


def test_the_cycles_of_a_word_are_what_the_published_gain_implies():
    """An input, and the only one: 1.59 with CSR on the A100. The stored bits do not matter there."""
    gpus = {"spqr-a100": profile("spqr-a100")}
    for csr_bits in (4.2, 4.4):
        bits = {(op, name): each for op in twin_shapes("llama2-7b") for name, each in ((DENSE, 16), (CSR, csr_bits))}
        assert mean_row(modelled_speedups(bits, "llama2-7b", gpus), CSR)["speedup"] == pytest.approx(1.59, abs=0.01)

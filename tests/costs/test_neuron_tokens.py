"""The cost model of whole tokens, by hand and on the paper's machines."""

import pytest

from toolkit.costs.machine import Memory, Profile, Software, Storage
from toolkit.costs.neuron_reads import neuron_tokens, null_machine, papers_tokens
from toolkit.evidence.comparison import compare, score
from toolkit.models.architectures import ARCHITECTURES

RATES = {"dense": 10.0, "neurons": 40.0}
MACHINE = Profile(
    "hand",
    "by hand",
    None,
    storage=Storage("disk", 1e12, 5.0, latency_s=1e-4, thread_gb_s=1.0),
    dram=Memory("memory", 1e12, 100.0, matvec_gb_s=RATES),
    device=Memory("memory", 1e12, 100.0, matvec_gb_s=RATES),
    software=Software("runtime", manage_gb_s=8.0),
)
WEIGHTS = ARCHITECTURES["opt-6.7b"].parameters
FFN, WHOLE = 2 * WEIGHTS["ffn"], 2 * (WEIGHTS["attention"] + WEIGHTS["ffn"] + WEIGHTS["embedding"])


def parts(machine, processor):
    table = neuron_tokens(machine, processor)
    return table[table["model"] == "opt-6.7b"].set_index("way")


def test_a_token_reads_manages_and_computes():
    """32 threads read 32 KiB in 132.768 us each: 7.9 GB/s, more than the disk's 5."""
    rows, loaded = parts(MACHINE, "cpu"), 0.024 * 2 * FFN
    assert rows.loc["naive", ["io_ms", "memory_ms", "compute_ms"]].tolist() == pytest.approx(
        [WHOLE / 5e6, 0, WHOLE / 10e6]
    )
    assert rows.loc["hybrid", "io_ms"] == pytest.approx(WHOLE / 10e6)
    expected = [loaded / 5e6, loaded / 8e6, (WHOLE - FFN) / 10e6 + FFN / 40e6]
    assert rows.loc["all", ["io_ms", "memory_ms", "compute_ms"]].tolist() == pytest.approx(expected)
    assert rows.loc["all", "total_ms"] == pytest.approx(sum(expected))
    assert rows.loc["all", "speedup"] == pytest.approx((WHOLE / 5e6 + WHOLE / 10e6) / sum(expected))


def test_a_gpu_loads_sixteen_bits_and_the_null_model_knows_bandwidths_alone():
    rows, loaded = parts(null_machine(MACHINE), "gpu"), 0.024 * FFN
    assert list(rows.index) == ["naive", "all"]
    expected = [loaded / 5e6, loaded / 100e6, WHOLE / 100e6]
    assert rows.loc["all", ["io_ms", "memory_ms", "compute_ms"]].tolist() == pytest.approx(expected)


def test_the_papers_inputs_come_back_and_the_rest_beats_bytes_over_bandwidth():
    model, null = papers_tokens()
    found = compare(model, "flash/tab03", null)
    run = found[found["ours"].notna()]
    assert run.loc[run["kind"] == "input", "ratio"].between(0.99, 1.01).all()
    assert run.loc[run["kind"] == "arithmetic", "ratio"].between(0.95, 1.05).all()
    off = score(found)
    assert off["n"] == off["null_n"] >= 20
    assert off["median_error"] < 0.1 < off["null_median_error"]

"""The cost models of neurons on disk, by hand and on the paper's machines."""

import pytest

from toolkit.evidence.comparison import compare
from toolkit.evidence.scores import score
from toolkit.machines.hardware import profile
from toolkit.machines.machine import Memory, Profile, Software, Storage
from toolkit.models import shapes
from toolkit.models.architectures import ARCHITECTURES
from toolkit.papers.flash.cost_model import Reads, neuron_reads, neuron_tokens, null_machine, papers_tokens

DISK = Storage("disk", 1e12, bandwidth_gb_s=1.0, latency_s=1e-3, request_s=1e-5)
MACHINE = Profile("hand", "by hand", None, storage=DISK)
# a layer has 1000 neurons of 2 · 4000 bytes, and as much attention as a quarter of that
SHAPES = {"q_proj": (500, 2000), "fc1": (1000, 2000), "fc2": (2000, 1000)}
READS = Reads("toy", layers=2, active=0.1, new=0.05, window=1, depth=10)


@pytest.fixture(autouse=True)
def toy(monkeypatch):
    monkeypatch.setitem(shapes.SHAPES, "toy", SHAPES)


def test_long_reads_take_their_bytes_over_the_bandwidth():
    naive, hybrid = (neuron_reads(MACHINE, READS, way) for way in ("naive", "hybrid"))
    assert (naive.read_bytes, naive.memory_bytes, naive.seconds) == (20e6, 0, 0.02)
    assert (hybrid.read_bytes, hybrid.memory_bytes, hybrid.seconds) == (10e6, 10e6, 0.01)
    assert [(span.stage, span.tier, span.nbytes) for span in hybrid.timeline.spans] == [("read", "storage", 10_000_000)]


def test_scattered_reads_share_latency_and_wait_for_their_turn():
    """With 10 reads under way a read of 8000 bytes costs 100 us of latency, 10 of its own and 8 of transfer."""
    found = neuron_reads(MACHINE, READS, "bundling")
    assert (found.read_bytes, found.reads) == (2 * 50 * 8000, 100)
    assert found.seconds == pytest.approx(100 * 118e-6 + 2 * 1e-3)
    apart = neuron_reads(MACHINE, READS, "windowing")
    assert (apart.read_bytes, apart.reads) == (found.read_bytes, 200)
    assert apart.seconds == pytest.approx(200 * 114e-6 + 2 * 1e-3)
    every = neuron_reads(MACHINE, READS, "predictor")
    assert every.reads == 400
    assert every.memory_bytes == 2 * (2e6 + 0.1 * 8e6)
    assert found.memory_bytes == pytest.approx(2 * (2e6 + 0.15 * 8e6), rel=1e-3)  # 0.1 and, of one more token, 0.05


def test_a_gap_is_worth_as_many_bytes_as_a_request_costs_time():
    assert DISK.gap_bytes(threads=10) == pytest.approx(110e-6 * 1e9)
    assert DISK.gap_bytes(threads=1) == pytest.approx(1.01e-3 * 1e9)


def test_a_chunk_on_a_line_takes_its_thread_a_time_and_the_disk_has_its_limit():
    """Two published throughputs of 32 threads give the line; a third chunk is predicted from it."""
    disk = profile("flash-m1-max").storage
    assert [disk.read_gb_s(size << 10, 32) for size in (8, 16)] == pytest.approx([1.25, 2.25], rel=1e-3)
    own_s = disk.latency_s + (32 << 10) / (disk.thread_gb_s * 1e9)
    assert disk.read_gb_s(32 << 10, 1) == pytest.approx((32 << 10) / own_s / 1e9)
    assert disk.read_gb_s(32 << 10, 32) == pytest.approx(3.75, rel=1e-2)
    assert disk.read_gb_s(1 << 20, 32) == pytest.approx(6.1)


RATES = {"dense": 10.0, "neurons": 40.0}
APPLE = Profile(
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
    rows, loaded = parts(APPLE, "cpu"), 0.024 * 2 * FFN
    assert rows.loc["naive", ["io_ms", "memory_ms", "compute_ms"]].tolist() == pytest.approx(
        [WHOLE / 5e6, 0, WHOLE / 10e6]
    )
    assert rows.loc["hybrid", "io_ms"] == pytest.approx(WHOLE / 10e6)
    expected = [loaded / 5e6, loaded / 8e6, (WHOLE - FFN) / 10e6 + FFN / 40e6]
    assert rows.loc["all", ["io_ms", "memory_ms", "compute_ms"]].tolist() == pytest.approx(expected)
    assert rows.loc["all", "total_ms"] == pytest.approx(sum(expected))
    assert rows.loc["all", "speedup"] == pytest.approx((WHOLE / 5e6 + WHOLE / 10e6) / sum(expected))


def test_a_gpu_loads_sixteen_bits_and_the_null_model_knows_bandwidths_alone():
    rows, loaded = parts(null_machine(APPLE), "gpu"), 0.024 * FFN
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

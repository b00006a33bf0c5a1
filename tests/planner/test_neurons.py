"""Neurons and packed experts in a plan, by hand-worked numbers."""

from dataclasses import replace

import pandas as pd
import pytest
import torch

from toolkit.errors import UserError
from toolkit.kernels.blocks import LAYOUTS
from toolkit.machines.machine import Memory, Profile
from toolkit.models.architectures import ARCHITECTURES
from toolkit.papers.endor.rates import Line
from toolkit.planner import hits, rates
from toolkit.planner import speed as speed_of_ways
from toolkit.planner.block_timing import of_blocks
from toolkit.planner.plan import plan
from toolkit.planner.rates import TIMED, Cost, Rates
from toolkit.planner.speed import Machine, speed
from toolkit.planner.target import open_target
from toolkit.planner.ways import NEURONS, ways
from toolkit.sparsity.trace import Trace, pack

GB = 10**9
SHAPE = ARCHITECTURES["llama2-7b"]


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Products at 10 GB/s; a layer by neuron takes 1 ms, 1 µs a read neuron and 20 GB/s; its reads 2 ms and 1 GB/s."""
    monkeypatch.setenv("TOOLKIT_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("toolkit.planner.hits.expert_hits", lambda shape, held: held)
    token = {(way.method, way.dtype): Cost(0, 0, 10) for way in TIMED} | {("spqr_packed", "bfloat16"): Cost(0, 0, 40)}
    experts = {bits: Cost(0, 0, 10) for bits in (16, 4, 2)}
    blocks = dict.fromkeys(LAYOUTS, 10)
    found = Rates(token, Line(0, 2), experts, Cost(1e-3, 1e-6, 20), Cost(2e-3, 0, 1), blocks=blocks)
    memory = Memory("round numbers", 64 * GB, 20, {"bf16": 1.0})
    made = Machine(Profile("round", "round numbers", None, dram=memory), found, 9 * GB)
    monkeypatch.setattr(speed_of_ways, "_rates", lambda fresh: found)
    monkeypatch.setattr(speed_of_ways, "_profile", lambda: made.profile)
    return made


def way(zeros):
    return next(way for way in ways(False, [zeros]) if way.kind == NEURONS)


def test_a_window_holds_what_its_tokens_use_and_reads_the_rest():
    """Neurons 0 and 1 by turns, then 2 for each token: a window of five tokens keeps all three and reads nothing."""
    active = torch.zeros(1, 8, 8, dtype=torch.bool)
    active[0, range(8), [0, 1] * 4] = True
    active[0, :, 2] = True
    trace = Trace("hand", "text", torch.zeros(1, 8, dtype=torch.int32), (8,), (pack(active),))
    found = hits.window_table(trace, [0.25, 1.0]).set_index("memory")
    assert found["needed"].tolist() == [2 / 8, 2 / 8]
    assert found.loc[1.0, ["held", "loaded"]].tolist() == [3 / 8, 0]
    assert found.loc[0.25, ["held", "loaded"]].tolist() == [2 / 8, 1 / 8]  # room for two: the other one comes anew


def test_counts_of_windows_are_those_of_memory_and_zeros(monkeypatch):
    rows = {"zeros": [0.8, 0.8, 0.9], "memory": [0.2, 1.0, 0.2], "held": [0.3, 0.7, 0.1], "loaded": [0.2, 0.0, 0.05]}
    monkeypatch.setattr(hits, "load_windows", lambda: pd.DataFrame(rows))
    assert hits.window_of(0.8, 0.6) == (pytest.approx(0.5), pytest.approx(0.1))
    assert hits.window_of(0.93, 0.6)[0] == 0.1


def test_where_memory_holds_four_and_a_half_experts_half_of_the_layers_hold_five(monkeypatch):
    monkeypatch.setattr(hits, "_hits", lambda few, share: share**2)
    shape = ARCHITECTURES["mixtral-8x7b"]
    assert hits.expert_hits(shape, 4.5 / 8) == pytest.approx((16 / 64 + 25 / 64) / 2)
    assert hits.expert_hits(shape, 0.1) == 4 / 64  # a token needs two
    assert hits.expert_hits(shape, 1.0) == 1


def test_a_token_by_neuron_is_read_and_computed_one_after_the_other(machine, monkeypatch):
    monkeypatch.setattr(hits, "window_of", lambda zeros, share: (0.3, 0.1))
    found = speed(SHAPE, way(0.8), machine, 64)
    block = 3 * 4096 * 2  # a neuron of three rows of 4096 weights fills six blocks
    predictors = 2 * 11008 * 4096 // 2 + 2 * 11008 * (4096 // 64) * 4  # half a byte a weight, four for a group of 64
    read_s = 32 * (2e-3 + 1100.8 * block / GB)
    neurons_s = 32 * (1e-3 + 1100.8e-6 + (predictors + 3302.4 * block) / 20 / GB)
    dense_s = 2 * (32 * 4 * 4096**2 + 32000 * 4096) / 10 / GB
    assert found.seconds == pytest.approx(read_s + neurons_s + dense_s, rel=1e-6)
    assert found.read_bytes == pytest.approx(32 * 1100.8 * block, abs=1)
    with pytest.raises(UserError, match=r"needs \d+ MB of DRAM, 1000 MB are given"):
        speed(SHAPE, way(0.8), replace(machine, dram_bytes=1_000_000_000), 64)


def times_are(monkeypatch, **tables):
    """Let the machine have been measured before: these tables, and of other kinds none that say much."""
    row = {"seconds": [1.0], "nbytes": [GB], "disturbed": [0.0], "layers": [1]}
    neurons = pd.DataFrame(row | {"loaded": [1], "read_s": [1.0], "read_bytes": [GB]})
    experts = pd.DataFrame(row | {"bits": [16], "used": [1], "dense_bytes": [0]})
    other = {"neuron_times": neurons, "mixture_times": experts, "torch_times": None}
    other["rival_times"] = pd.DataFrame(row | {"method": "none"})[:0]
    for name, table in (other | tables).items():
        monkeypatch.setattr(rates, name, lambda table=table, **options: table)


def test_rates_come_back_from_times_that_are_made_of_them(monkeypatch):
    """A layer takes 1 ms, and bytes pass at 10 GB/s; a burst of reads takes 2 ms, a neuron 10 µs; the disk, 2 GB/s."""
    layers, nbytes = pd.Series([16, 4, 1]), pd.Series([7e6, 26e6, 100e6])
    token = {"stage": "token", "method": "dense_packed", "dtype": "bfloat16", "layers": layers, "nbytes": nbytes}
    token = pd.DataFrame(token | {"seconds": 5e-3 + layers * 1e-3 + layers * nbytes / 10 / GB, "disturbed": 0.0})
    read = token.assign(stage="read", seconds=1e-3 + nbytes / 2 / GB)
    partly = token[:1].assign(stage="partly")
    loaded, block, nbytes = (pd.Series(each) for each in ([40.0, 100.0, 250.0], [4096, 8192, 12288], [2e6, 3e7, 1e7]))
    neurons = {"loaded": loaded, "nbytes": nbytes, "seconds": 1e-3 + 1e-6 * loaded + nbytes / 20 / GB, "disturbed": 0.5}
    neurons |= {"read_bytes": loaded * block, "read_s": 2e-3 + 1e-5 * loaded + loaded * block / 2 / GB}
    times_are(monkeypatch, layer_times=pd.concat([token, read, partly]), neuron_times=pd.DataFrame(neurons))
    found = rates.rates()
    dense = found.token["dense_packed", "bfloat16"]
    assert (dense.once_s, dense.each_s, dense.gb_s) == pytest.approx((5e-3, 1e-3, 10))
    assert (found.read.fixed_s, found.read.gb_s) == pytest.approx((1e-3, 2))
    assert found.neuron.seconds(100, 1e8) == pytest.approx(1e-3 + 1e-4 + 5e-3)
    read_by = found.neuron_read
    assert (read_by.once_s, read_by.each_s, read_by.gb_s) == pytest.approx((2e-3, 1e-5, 2))
    assert found.rival == {}  # llama.cpp could not run


def test_a_type_of_blocks_is_measured_once_when_it_is_asked_for(monkeypatch):
    asked = []

    def block_times(kind, fresh):
        asked.append((kind, fresh))
        return pd.DataFrame({"method": [kind], "nbytes": [3 * GB], "seconds": [0.5]})

    monkeypatch.setattr(rates, "block_times", block_times)
    found = rates.BlockRates(fresh=True)
    assert (found["Q4_K"], found["Q4_K"], found["Q6_K"]) == (6, 6, 6)
    assert asked == [("Q4_K", True), ("Q6_K", True)]


def test_the_time_of_blocks_is_that_of_a_product():
    (row,) = of_blocks("Q8_0").itertuples()
    assert (row.method, row.nbytes) == ("Q8_0", pytest.approx(1 << 26, rel=0.01))
    assert 0 < row.seconds < 10


def test_a_sparse_model_is_planned_at_its_own_zeros_at_no_price(machine):
    table = plan(open_target("smollm2-135m-sparse90"), 9 * GB).table.set_index("way")
    assert [name for name in table.index if name.startswith("neurons")] == ["neurons, 90 % zeros"]
    assert table.loc["neurons, 90 % zeros", "relative"] == 1
    dense = plan(open_target("smollm2-135m"), 9 * GB).table.set_index("way")
    assert dense.loc["neurons, 90 % zeros", "relative"] > 2
    assert open_target("mixtral-8x7b").cut == ()

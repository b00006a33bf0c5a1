"""Plans on a machine with round numbers, without a probe."""

import json
from dataclasses import replace

import pandas as pd
import pytest

from toolkit.__main__ import main
from toolkit.costs.machine import Links, Memory, Profile
from toolkit.errors import UserError
from toolkit.measure.rates import Line
from toolkit.models import MODELS
from toolkit.models.architectures import ARCHITECTURES
from toolkit.planner import rates as rates_of_machine
from toolkit.planner import sizes, speed
from toolkit.planner.plan import measured_ranges, plan
from toolkit.planner.rates import BY_TORCH, TIMED, Cost, Rates
from toolkit.planner.speed import Machine
from toolkit.planner.target import open_target
from toolkit.planner.ways import EXPERT_BITS, ways

GB = 10**9
LLAMA = open_target("llama2-7b")


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Products at 10 GB/s, a disk at 2 GB/s, nothing else takes time."""
    monkeypatch.setenv("TOOLKIT_RESULTS_DIR", str(tmp_path / "results"))
    token = {(way.method, way.dtype): Cost(0, 0, 10) for way in TIMED} | {(BY_TORCH, "bfloat16"): Cost(0, 0, 10)}
    experts = {bits: Cost(0, 0, 10) for bits in EXPERT_BITS}
    rates = Rates(token, Line(0, 2), experts, neuron=Cost(0, 0, 10), neuron_read=Cost(0, 0, 2))
    memory = Memory("round numbers", 64 * GB, 20, {"bf16": 1.0})
    made = Machine(Profile("round", "round numbers", None, dram=memory), rates, 6 * GB)
    monkeypatch.setattr("toolkit.planner.hits.expert_hits", lambda shape, held: held)
    monkeypatch.setattr(speed, "_rates", lambda fresh: rates)
    monkeypatch.setattr(speed, "_profile", lambda: made.profile)
    return made


def way(name, experts=False):
    return next(way for way in ways(experts) if way.name == name)


def test_a_token_whose_layers_all_stay_takes_its_bytes_over_the_products_rate(machine):
    shape, int8 = ARCHITECTURES["llama2-7b"], way("int8")
    found = speed.speed(shape, int8, replace(machine, dram_bytes=9 * GB), 64)
    nbytes = 32 * sizes.layer_bytes(shape, int8) + sizes.head_bytes(shape)
    assert found.seconds == pytest.approx(nbytes / 10 / GB, rel=1e-6)
    assert (found.read_bytes, found.held) == (0, 1.0)


def test_a_token_from_disk_takes_its_bytes_over_the_disks_rate(machine):
    shape, dense = ARCHITECTURES["llama2-7b"], way("dense")
    found = speed.speed(shape, dense, machine, 64)
    layer = sizes.layer_bytes(shape, dense)
    memory = sizes.footprint(shape, dense)
    held = round(found.held * 32) + sizes.SLOTS  # layers, and those that the others pass through
    assert found.dram_bytes == pytest.approx(memory.fixed_bytes + held * layer, rel=1e-3)
    assert found.read_bytes == round((1 - found.held) * 32) * layer
    assert found.seconds == pytest.approx(
        found.read_bytes / 2 / GB, rel=0.05
    )  # of products, those of layers in memory are in part beside it
    assert found.limit == "disk"


def test_products_lose_time_to_reads_beside_them(machine):
    """Ten seconds of products for each of reads: the reads are hidden, and half of their time is lost."""
    shape, dense = ARCHITECTURES["llama2-7b"], way("dense")
    slow = {key: Cost(0, 0, 0.2) for key in machine.rates.token}
    slower = [replace(machine, rates=replace(machine.rates, token=slow, slowdown=slowdown)) for slowdown in (0.0, 0.5)]
    hidden, found = (speed.speed(shape, dense, each, 64) for each in slower)
    assert found.seconds - hidden.seconds == pytest.approx(found.read_bytes / 2 / GB / 2)


def test_the_first_way_is_the_fastest_within_the_loss(machine):
    found = plan(LLAMA, 6 * GB)
    within = found.table[(found.table["relative"] <= 1.05) & ~found.table["at_best"]]
    assert found.table["way"][0] == within.loc[within["tokens_s"].idxmax(), "way"] == "int8, head too"
    assert "--int8" in found.commands[0]
    assert "MODEL" in found.commands[0]  # a shape has no weights
    assert "limits it" in found.why
    assert any("faster at a higher price: spqr, 3 bits, head too" in line for line in found.advice)
    assert "perplexity × 1.0" in found.why
    dearer = plan(LLAMA, 6 * GB, loss=0.2)
    assert dearer.table["way"][0] == "spqr, 3 bits, head too"
    assert any("perhaps faster: llama.cpp Q4_0" in line for line in dearer.advice)  # a limit is no prediction


def test_ways_that_do_not_fit_are_left_out_with_what_they_take(machine):
    found = plan(LLAMA, 1_000_000_000)
    assert any("dense" in line and "MB of DRAM, 1000 MB are given" in line for line in found.left_out)
    with pytest.raises(UserError, match=r"5 MB of DRAM are too few. The smallest way, .*, takes \d+ MB"):
        plan(LLAMA, 5_000_000)


def test_ranges_come_from_the_last_run_of_the_notebook(machine, tmp_path, monkeypatch):
    """Four of five of the ratios 0.8, 0.9, 1.1 and 1.2 lie between 0.83 and 1.17; three measurements make no range."""
    monkeypatch.setenv("TOOLKIT_RESULTS_DIR", str(tmp_path))
    (tmp_path / "beyond" / "planner").mkdir(parents=True)
    rows = {"tokens_per_s": [8, 9, 11, 12, 1, 1, 1, 1], "kind": ["layers"] * 5 + ["neurons"] * 3}
    table = pd.DataFrame(rows).assign(part="race", predicted_per_s=10.0, disturbed=[0, 0, 0, 0, 1, 0, 0, 0])
    table.to_csv(tmp_path / "beyond" / "planner" / "table.csv", index=False)
    assert measured_ranges() == {"layers": (pytest.approx(0.83), pytest.approx(1.17))}
    row = plan(LLAMA, 6 * GB).table.iloc[0]
    assert row["low"] == pytest.approx(0.83 * row["tokens_s"])


def test_a_price_of_another_model_is_to_be_measured(machine, tmp_path):
    mine = replace(open_target("smollm2-135m"), name="mine")
    found = plan(mine, 160_000_000, loss=0.2)  # where 16 bits are read from disk
    assert (named := found.table["quality_of"][0]) in MODELS
    assert f"the price was measured with {named}: --measure evaluates mine itself" in found.advice
    assert not any("--measure" in line for line in plan(LLAMA, 6 * GB).advice)  # a shape has no weights
    (spaced := tmp_path / "my model").mkdir()
    assert f"pack '{spaced}' " in plan(replace(mine, name=str(spaced)), 160_000_000, loss=0.2).commands[0]


def test_the_command_prints_a_table_or_json(machine, capsys):
    assert main(["plan", "llama2-7b", "--dram", "6GB"]) == 0
    shown = capsys.readouterr().out
    assert "int8, head too is the fastest way within a loss of 5%" in shown
    assert "python -m toolkit pack MODEL" in shown
    assert main(["plan", "llama2-7b", "--dram", "2000.5MB"]) == 0
    assert " --dram 2000.5MB" in capsys.readouterr().out  # as given: `run` would refuse less
    assert main(["plan", "llama2-7b", "--dram", "6GB", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ways"][0]["way"] == "int8, head too"
    first = found["ways"][0]
    assert first["low"] < first["tokens_s"] < first["high"]  # nothing was measured here: as on kept machines


def test_the_machine_is_measured_once_for_models_of_all_kinds(machine, monkeypatch, capsys):
    kept = set()

    def measure(make=True):
        kept.update({"times"} if make else set())
        return "times" if kept else None

    monkeypatch.setattr(rates_of_machine, "_measures", lambda: {"layers": measure})
    monkeypatch.setattr(speed, "_rates", lambda fresh: measure() and machine.rates)
    for model, said in (("llama2-7b", True), ("mixtral-8x7b", False), ("opt-6.7b", False)):
        assert main(["plan", model, "--dram", "30GB"]) == 0
        assert ("measuring this machine, once for all plans" in capsys.readouterr().err) == said


def test_bad_input_is_one_line(machine, capsys):
    for arguments, message in (
        (["llama2-7b", "--dram", "6 apples"], "--dram 6 apples: expected a size such as 500MB"),
        (["llama2-7b", "--device-memory", "0"], "--device-memory 0: expected more than nothing"),
        (["llama2-7b", "--device-memory", "2GB"], "torch sees no GPU here"),
        (["llama2-7b", "--loss", "nan%"], "--loss nan%: expected a share"),
        (["llama2-7b", "--prompt-tokens", "0"], "--prompt-tokens: 0: expected a whole number from 1"),
        (["llama2-7b", "--measure"], "leave --measure out"),
        (["llama2-7b", "--text", "/nowhere.txt"], "unknown corpus '/nowhere.txt'"),
        (["llama2-7b", "--machine", "phone-like", "--fresh"], "--fresh: plans for phone-like are by bytes alone"),
        (["llama2-7c", "--dram", "6GB"], "unknown model 'llama2-7c'; did you mean 'llama2-7b'"),
    ):
        assert main(["plan", *arguments]) == 2
        assert message in capsys.readouterr().err.splitlines()[-1]


@pytest.fixture
def gpu(machine, monkeypatch):
    """The machine with a GPU of 4 GB for weights and 1000 GB/s, behind a link of 10 GB/s."""
    parts = {"device": Memory("gpu", 4 * GB + 2**30, 1000), "links": Links(2, 10)}
    monkeypatch.setattr(speed, "_profile", lambda: replace(machine.profile, **parts))
    monkeypatch.setattr("toolkit.planner.plan.describe", lambda: {"gpu": "gpu"})


def test_a_gpu_of_this_machine_is_planned_by_bytes_alone(gpu):
    """Int8 layers that 4 GB do not hold are copied for each token, at 10 GB/s."""
    shape, int8 = ARCHITECTURES["llama2-7b"], way("int8")
    found = plan(LLAMA, 20 * GB)
    row = found.table.set_index("way").loc["int8, GPU"]
    memory, used = sizes.footprint(shape, int8), sizes.token_bytes(shape, int8)
    assert row["tokens_s"] == pytest.approx(1 / ((1 - 4 * GB / memory.whole_bytes) * used / 10 / GB))
    assert (row["at_best"], row["limit"]) == (True, "copies")
    assert not found.table["gpu"][0]  # a limit does not come first
    assert any("--device cuda" in line and "nothing was measured with this GPU" in line for line in found.advice)
    smaller = plan(LLAMA, 20 * GB, device_bytes=2 * GB).table.set_index("way")
    assert smaller.loc["int8, GPU", "tokens_s"] < row["tokens_s"]


def test_a_limit_that_is_too_small_is_refused_before_the_machine_is_measured(monkeypatch):
    monkeypatch.setattr(speed, "_profile", lambda: pytest.fail("measured"))
    with pytest.raises(UserError, match=r"llama2-7b: 10 MB of DRAM are too few. The smallest way, .*, takes \d+ MB"):
        plan(LLAMA, dram_bytes=10_000_000)

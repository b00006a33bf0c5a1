"""Plans on a machine with round numbers, without a probe."""

import json
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

import toolkit as tk
from tests.refusals import refused_command
from toolkit import paths
from toolkit.__main__ import main
from toolkit.errors import UserError
from toolkit.kernels.blocks import LAYOUTS
from toolkit.machines.machine import Links, Memory, Profile
from toolkit.models import MODELS
from toolkit.models.architectures import ARCHITECTURES, ModelShape
from toolkit.papers.endor.rates import Line
from toolkit.planner import rates as rates_of_machine
from toolkit.planner import sizes, speed
from toolkit.planner import target as target_of_plan
from toolkit.planner.choices import choose
from toolkit.planner.footprint import FileBytes, Footprint
from toolkit.planner.plan import plan
from toolkit.planner.plan_table import WIDTH, plan_table
from toolkit.planner.ranges import make_ranges
from toolkit.planner.rates import BY_TORCH, TIMED, Cost, Rates
from toolkit.planner.speed import Machine
from toolkit.planner.target import Target, open_target
from toolkit.planner.ways import EXPERT_BITS, STREAMED, PlannedWay, ways

GB = 10**9
BLOCKS = dict.fromkeys(LAYOUTS, 10)
LLAMA = open_target("llama2-7b")


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Products at 10 GB/s, a disk at 2 GB/s, nothing else takes time."""
    monkeypatch.setenv("TOOLKIT_RESULTS_DIR", str(tmp_path / "results"))
    token = {(way.method, way.dtype): Cost(0, 0, 10) for way in TIMED} | {(BY_TORCH, "bfloat16"): Cost(0, 0, 10)}
    experts = {bits: Cost(0, 0, 10) for bits in EXPERT_BITS}
    rates = Rates(token, Line(0, 2), experts, neuron=Cost(0, 0, 10), neuron_read=Cost(0, 0, 2), blocks=BLOCKS)
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


def test_the_fastest_way_within_the_loss_and_one_just_above_it_are_named_with_their_commands(machine):
    found = plan(LLAMA, 6 * GB)
    table = found.table
    assert table["tokens_s"].is_monotonic_decreasing
    within = table[(table["relative"] <= 1.05) & ~table["at_best"]]
    first, above = found.choices
    assert first.way == within.loc[within["tokens_s"].idxmax(), "way"] == "int8, head too"
    assert "--int8" in first.commands[0]
    assert "limits it" in first.why
    assert above.way == "spqr, 3 bits, head too"
    assert above.row["tokens_s"] > 1.2 * first.row["tokens_s"]
    assert "Just above a loss of 5%: spqr, 3 bits, head too" in above.why
    for choice, packed in zip(found.choices, ("int8-head-too", "spqr-3-bits-head-too"), strict=True):
        pack, run = choice.commands
        assert pack.startswith("sparse-offload pack MODEL --method")  # a shape has no weights
        assert pack.endswith(f"--out {packed}")
        assert run == f'sparse-offload run {packed} --dram 6000MB --prompt "The library of Alexandria"'
    dearer = plan(LLAMA, 6 * GB, loss=0.2)
    assert [choice.way for choice in dearer.choices] == ["spqr, 3 bits, head too"]
    assert any("Perhaps faster: llama.cpp Q4_0" in line for line in dearer.advice)  # a limit is no prediction


def priced(*rows):
    """A table of plans: names, tokens a second, prices; llama.cpp's rows are limits."""
    table = pd.DataFrame(rows, columns=["way", "tokens_s", "relative"])
    rival = table["way"].str.startswith("llama.cpp")
    table = table.assign(at_best=rival, rival=rival, runs_here=~rival, guess=False, limit="disk", read_mb=1.0)
    return table.assign(within=table["relative"] <= 1.05, gpu=False, quality_of="a model")


@pytest.mark.parametrize(
    ("rows", "names"),
    [
        ([("dense", 1.0, 1.0), ("spqr, 3 bits", 1.05, 1.06)], ["dense"]),  # hardly faster
        ([("dense", 1.0, 1.0), ("spqr, 3 bits", 9.0, 7.5)], ["dense"]),  # far above the loss
        ([("dense", 1.0, 1.0), ("spqr, 3 bits", 2.0, 1.1), ("int8", 3.0, 1.2)], ["dense", "int8"]),
        ([("dense", 1.0, 1.0), ("llama.cpp Q8_0", 9.0, 1.0)], ["dense"]),  # a limit beats no prediction
        ([("llama.cpp Q8_0", 0.1, 1.0), ("spqr, 3 bits", 0.7, 1.1)], ["llama.cpp Q8_0", "spqr, 3 bits"]),
    ],
)
def test_choices_by_hand(rows, names):
    known = {way.name: way for way in ways(False)}
    found = [*choose(priced(*rows), 0.05, LLAMA, known, {"--dram": None})]
    assert [choice.way for choice in found] == names
    if names[0].startswith("llama.cpp"):
        assert "at most 0.1 tokens/s" in found[0].why
        assert "No way of the toolkit is within the loss." in found[0].why
        assert "Just above" in found[1].why
        assert found[1].commands


def test_a_price_of_another_model_is_a_guess_and_orders_no_rows(machine):
    """LLaMA2's prices are those of smaller models; only what changes no weight costs what it says."""
    found = plan(LLAMA, 6 * GB)
    known = found.table[~found.table["guess"] & found.table["relative"].notna()]
    assert set(known["way"]) == {"dense", "llama.cpp F16"}
    assert all("is a guess" in choice.why for choice in found.choices)
    shown = plan_table(found.table, [choice.way for choice in found.choices], "limit")
    (line,) = [line for line in shown.splitlines() if line.startswith("* spqr, 3 bits, head too")]
    assert "~1." in line
    assert "~ a guess: the price of" in shown
    own = plan(replace(open_target("smollm2-135m"), file=None), 140_000_000)
    assert "measured with this model" in own.choices[0].why


@pytest.mark.parametrize("name", ["opt-6.7b", "deepseek-v3"])
def test_a_table_has_at_most_a_hundred_columns_and_what_reads_most_of_it_waits_for_the_disk(name, slow_disk):
    target = open_target(name)
    least = sizes.footprint(target.shape, target.ways[0]).needed_bytes
    for dram_bytes in (int(1.01 * least), int(target.nbytes)):
        found = plan(target, dram_bytes)
        shown = plan_table(found.table, [], "range", "first", "read", "in DRAM", "limit")
        assert max(map(len, shown.splitlines())) <= WIDTH
        moved = [sizes.token_bytes(target.shape, it) for it in map(found_way(target), found.table["way"])]
        assert set(found.table["limit"][found.table["read_mb"] * 1e6 > 0.9 * pd.Series(moved)]) <= {"disk"}


@pytest.fixture
def slow_disk(machine, monkeypatch):
    """Memory seems no faster than the disk, as it does where other work is beside the measurement."""
    profile = replace(machine.profile, dram=replace(machine.profile.dram, bandwidth_gb_s=1.5))
    monkeypatch.setattr(speed, "_profile", lambda: profile)


def found_way(target):
    """The way of a name."""
    return {way.name: way for way in target.ways}.__getitem__


def test_the_example_of_the_readme_is_what_the_plan_says(machine, monkeypatch):
    readme = (paths.root() / "README.md").read_text(encoding="utf-8")
    commands = readme.partition("sparse-offload plan qwen2.5-coder-1.5b --dram 700MB")[2].splitlines()[1:3]
    text = " ".join(readme.split())
    shape, types = ModelShape(28, 1536, 8960, 12, 151936, 2, 128), {"Q6_K": 354_009_600, "Q4_K": 625_508_352}
    file = FileBytes(Footprint(27_814_912, 28_162_048, 35, 60_817_408), types)
    of_file = PlannedWay("as it is, Q4_K_M", STREAMED, "dense", "gguf_packed", head="gguf", file=file)
    monkeypatch.setattr(target_of_plan, "ways_of_file", lambda path, shape: (of_file,))
    first, above = plan(Target("qwen2.5-coder-1.5b", shape, 2, True, file=Path("qwen.gguf")), 700_000_000).choices
    assert first.way == "as it is, Q4_K_M"
    assert "fastest within a loss of 5 %, here the file as it is" in text
    pack, run = (line.strip() for line in commands)
    assert pack.replace(" --no-evaluate", "") == above.commands[0]
    assert run.partition(" --prompt")[0] == above.commands[1].partition(" --prompt")[0]
    assert round(above.row["relative"], 2) == 1.07
    assert "just above it, here 3 bits at 7 %" in text


def test_ways_that_do_not_fit_are_left_out_with_what_they_take(machine):
    found = plan(LLAMA, 1_000_000_000)
    assert any("dense" in line and "MB of DRAM, 1000 MB are given" in line for line in found.left_out)
    with pytest.raises(UserError, match=r"5 MB of DRAM are too few. The smallest way, .*, takes \d+ MB"):
        plan(LLAMA, 5_000_000)


def test_ranges_come_from_kept_races(machine, tmp_path, monkeypatch):
    """Four of five of the ratios 0.8, 0.9, 1.1 and 1.2 lie between 0.83 and 1.17; three measurements make no range."""
    (tmp_path / "here" / "beyond" / "planner").mkdir(parents=True)
    rows = {"tokens_per_s": [8, 9, 11, 12, 1, 1, 1, 1], "kind": ["layers"] * 5 + ["neurons"] * 3}
    table = pd.DataFrame(rows).assign(part="race", predicted_per_s=10.0, disturbed=[0, 0, 0, 0, 1, 0, 0, 0])
    table.to_csv(tmp_path / "here" / "beyond" / "planner" / "table.csv", index=False)
    (row,) = make_ranges(tmp_path).itertuples(index=False)
    assert tuple(row) == ("layers", pytest.approx(0.83), pytest.approx(1.17), 4, "here")
    assert make_ranges(tmp_path / "none").empty
    monkeypatch.setattr("toolkit.planner.plan.load_ranges", lambda: {"layers": (0.83, 1.17)})
    row = plan(LLAMA, 6 * GB).choices[0].row
    assert row["low"] == pytest.approx(0.83 * row["tokens_s"])


def test_a_guess_can_be_measured_where_there_are_weights(machine, tmp_path):
    mine = replace(open_target("smollm2-135m"), name="mine")
    found = plan(mine, 160_000_000, loss=0.2)  # where 16 bits are read from disk
    assert found.choices[0].row["quality_of"] in MODELS
    assert "--measure evaluates mine itself, in place of guesses." in found.advice
    assert not any("--measure" in line for line in plan(LLAMA, 6 * GB).advice)  # a shape has no weights
    (spaced := tmp_path / "my model").mkdir()
    named = plan(replace(mine, name=str(spaced)), 160_000_000, loss=0.2)
    assert f"pack '{spaced}' " in named.choices[0].commands[0]


def test_the_command_prints_a_table_or_json(machine, capsys):
    assert main(["plan", "llama2-7b", "--dram", "6GB"]) == 0
    shown = capsys.readouterr().out
    assert "Within a loss of 5%: int8, head too" in shown
    assert "Just above a loss of 5%: spqr, 3 bits, head too" in shown
    assert shown.count("    sparse-offload pack MODEL") == shown.count("    sparse-offload run ") == 2
    assert "The fastest way stands first." in shown
    assert main(["plan", "llama2-7b", "--dram", "2000.5MB"]) == 0
    assert " --dram 2000.5MB" in capsys.readouterr().out  # as given: `run` would refuse less
    assert main(["plan", "llama2-7b", "--dram", "6GB", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    first = found["choices"][0]
    assert first["way"] == "int8, head too"
    row = next(row for row in found["ways"] if row["way"] == first["way"])
    assert row["low"] < row["tokens_s"] < row["high"]  # nothing was measured here: as on kept machines


def test_the_front_door_takes_one_limit(machine, monkeypatch):
    monkeypatch.setattr("toolkit.planner.memory.present_bytes", lambda file, *way: 300_000_000)
    found = tk.plan("llama2-70b", memory="24GB")
    assert repr(found) == repr(plan(open_target("llama2-70b"), memory_bytes=24 * GB))


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
        (["llama2-7b", "--device-memory", "2GB"], "torch sees no GPU here"),
        (["llama2-7b", "--loss", "nan%"], "--loss nan%: expected a share"),
        (["llama2-7b", "--prompt-tokens", "0"], "--prompt-tokens: 0: expected a whole number from 1"),
        (["llama2-7b", "--text", "/nowhere.txt"], "unknown corpus '/nowhere.txt'"),
        (["llama2-7b", "--machine", "phone-like", "--fresh"], "--fresh: plans for phone-like are by bytes alone"),
    ):
        refused_command(["plan", *arguments], message, capsys)


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
    assert not any(choice.row["gpu"] for choice in found.choices)  # a limit is not chosen
    assert any("--device cuda" in line and "nothing was measured with this GPU" in line for line in found.advice)
    smaller = plan(LLAMA, 20 * GB, device_bytes=2 * GB).table.set_index("way")
    assert smaller.loc["int8, GPU", "tokens_s"] < row["tokens_s"]


def test_a_limit_that_is_too_small_is_refused_before_the_machine_is_measured(monkeypatch):
    monkeypatch.setattr(speed, "_profile", lambda: pytest.fail("measured"))
    with pytest.raises(UserError, match=r"llama2-7b: 10 MB of DRAM are too few. The smallest way, .*, takes \d+ MB"):
        plan(LLAMA, dram_bytes=10_000_000)

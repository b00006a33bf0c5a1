"""Plans within a limit of the whole process."""

import re

import pytest
from gguf_files import CASES, write

from tests.planner.test_plan import GB, LLAMA, machine
from toolkit.__main__ import main
from toolkit.errors import UserError
from toolkit.models.gguf_header import read_header
from toolkit.offload.decoder.architecture import architecture_of
from toolkit.offload.overhead import Overhead, TextRoom
from toolkit.planner import memory, sizes
from toolkit.planner.memory import Beside, configuration
from toolkit.planner.plan import plan
from toolkit.planner.plan_table import plan_text
from toolkit.planner.target import open_target
from toolkit.planner.ways import STREAMED, PlannedWay
from toolkit.storage.gguf_store import GgufStore

MB = 10**6
BESIDE = Beside(layers=400 * MB, neurons=450 * MB, rival=100 * MB)
__all__ = ["machine"]


@pytest.fixture
def beside(monkeypatch, machine):
    """A process of ours takes 0.4 GB beside weights, llama.cpp 0.1."""
    monkeypatch.setattr(memory.Beside, "of", lambda target, prompt_tokens, kv_type: BESIDE)


def test_each_way_has_what_its_own_process_leaves(beside):
    within, counted = plan(LLAMA, memory_bytes=6 * GB), plan(LLAMA, 6 * GB - 400 * MB)
    rows, others = (found.table.set_index("way") for found in (within, counted))
    known = {way.name: way for way in LLAMA.ways}
    for name in ("int8", "spqr, 3 bits"):
        assert rows.loc[name, "tokens_s"] == others.loc[name, "tokens_s"]
        needed = BESIDE.layers + sizes.footprint(LLAMA.shape, known[name]).needed_bytes
        assert rows.loc[name, "needs_mb"] == pytest.approx(needed / MB)
    assert rows.loc["llama.cpp F16", "dram_mb"] == 5900
    assert rows.loc["llama.cpp F16", "needs_mb"] == 100
    assert all("--memory 6000MB" in choice.commands[-1] for choice in within.choices)
    assert "6.00 GB for the process." in plan_text(within)
    assert "Needs: memory of the process" in plan_text(within)
    assert "Needs:" not in plan_text(counted)


def test_too_little_for_the_process_is_one_line(beside):
    found = plan(LLAMA, memory_bytes=1_400_000_000)
    assert any("1000 MB are given, and 400 MB beside it" in line for line in found.left_out)
    with pytest.raises(
        UserError, match=r"500 MB for the process are too few. The smallest way, .*, takes (\d+) MB"
    ) as e:
        plan(LLAMA, memory_bytes=500 * MB)
    least = int(re.search(r"takes (\d+) MB", str(e.value))[1])
    assert plan(LLAMA, memory_bytes=least * MB).choices
    with pytest.raises(UserError, match="give one of them"):
        plan(LLAMA, 6 * GB, memory_bytes=6 * GB)


def test_the_command_takes_one_limit(beside, capfd):
    assert main(["plan", "llama2-7b", "--memory", "6GB"]) == 0
    assert "6.00 GB for the process" in capfd.readouterr().out
    for more, words in (
        (["--dram", "5GB"], "--memory limits the whole process"),
        (["--machine", "endor-rtx4080"], "--memory: plans for endor-rtx4080 are by bytes alone"),
        (["--kv-type", "q8_0"], "--kv-type q8_0: llama2-7b runs by transformers here"),
    ):
        assert main(["plan", "llama2-7b", "--memory", "6GB", *more]) == 2
        assert words in capfd.readouterr().err


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3moe", "llama, tied"])
def test_what_comes_beside_weights_is_what_run_counts(tmp_path, name):
    """The sizes of a plan stand for the configuration of a model."""
    write(CASES[name].model(), CASES[name], file := tmp_path / "model.gguf")
    planned = Overhead.of(configuration(open_target(str(file)).shape, 4), TextRoom(64, 40))
    run = Overhead.of_store(GgufStore.open(file), TextRoom(64, 40), compiles=False)
    assert planned.nbytes == pytest.approx(run.nbytes, rel=0.002)


@pytest.mark.parametrize(
    ("name", "ways"), [("llama", {"file": ["without-torch"], "layers": []}), ("phi3", {"layers": []})]
)
def test_a_file_that_runs_without_torch_needs_less(tmp_path, name, ways, monkeypatch):
    write(CASES[name].model(), CASES[name], file := tmp_path / "model.gguf")
    asked = []
    monkeypatch.setattr(memory, "present_bytes", lambda file, *way: asked.append([*way]) or 1000)
    beside = Beside.of(open_target(str(file)), 64)
    assert sorted(asked) == sorted(ways.values())
    assert (beside.file is not None) == ("file" in ways)
    assert (beside.file or 0) < beside.layers
    as_it_is = PlannedWay("as it is", STREAMED, "dense", "gguf_packed", file=object())
    assert beside.bytes_of(as_it_is) == (beside.file or beside.layers)


def test_a_plan_counts_the_type_of_keys_and_values(tmp_path, monkeypatch):
    write(CASES["gemma3"].model(), CASES["gemma3"], file := tmp_path / "model.gguf")
    monkeypatch.setattr(memory, "present_bytes", lambda file, *way: 0)
    target, sizes = open_target(str(file)), architecture_of(read_header(file))
    nbytes = {kv_type: Beside.of(target, 10_000, kv_type).file for kv_type in ("f32", "q8_0")}
    cache = {kv_type: sizes.with_cache(kv_type).cache_bytes(10_000 + memory.NEW_TOKENS) for kv_type in nbytes}
    assert nbytes["f32"] - nbytes["q8_0"] == cache["f32"] - cache["q8_0"] > 0

"""The ways of running a GGUF file as it is: their bytes, beside the memory that the runtime takes."""

from dataclasses import replace

import pytest
from gguf_files import CASES, write

from tests.planner.test_plan import machine  # noqa: F401 - a fixture
from toolkit.offload.budget import Budget, BudgetError
from toolkit.offload.decoder.architecture import architecture_of
from toolkit.offload.decoder.decoder import Decoder
from toolkit.offload.model import OffloadedModel
from toolkit.planner import files
from toolkit.planner.plan import plan
from toolkit.planner.target import open_target

GB = 10**9


def target_of(case, folder, kind="F32", **fields):
    """A small file of random weights."""
    case = replace(CASES[case], fields={**CASES[case].fields, **fields})
    write(case.model(), case, file := folder / "model.gguf", kind)
    files.ways_of_file.cache_clear()
    return open_target(str(file))


@pytest.mark.parametrize("case", ["llama", "qwen3moe", "gpt-oss"])
def test_what_a_plan_lets_through_is_not_refused_and_what_it_leaves_out_would_be(case, tmp_path):
    target = target_of(case, tmp_path)
    ours, rival = files.ways_of_file(target.file, target.shape)
    needed, budget = ours.file.memory.needed_bytes, lambda nbytes: Budget("DRAM", nbytes)
    sizes = architecture_of(header := files.read_header(target.file))
    if sizes is not None:  # without torch
        with Decoder.open(header, sizes, budget(needed), 64) as decoder:
            assert decoder.budget.used_bytes <= needed
        with pytest.raises(BudgetError) as refused:
            Decoder.open(header, sizes, budget(1000), 64)
        assert needed == refused.value.needed_bytes
    else:
        with OffloadedModel.open(target.file, dram_bytes=needed) as model:
            assert model.budgets["dram"].used_bytes <= needed
        with pytest.raises(BudgetError) as refused:
            OffloadedModel.open(target.file, dram_bytes=1000)
        assert needed == pytest.approx(refused.value.needed_bytes, rel=0.06)
    assert rival.file.memory.whole_bytes <= target.file.stat().st_size


def test_a_tokens_bytes_by_hand(tmp_path):
    """All matrices but the embedding, which is not the head; of a mixture, the share of experts that a token uses."""
    target = target_of("qwen3moe", tmp_path)
    header, types = files.read_header(target.file), files.ways_of_file(target.file, target.shape)[0].file.types
    nbytes = 0
    for name, tensor in header.tensors.items():
        if name.endswith("_exps.weight"):
            nbytes += tensor.nbytes * target.shape.experts_per_token // target.shape.experts
        elif len(tensor.shape) == 2 and (name != "token_embd.weight" or "output.weight" not in header.tensors):
            nbytes += tensor.nbytes
    assert sum(types.values()) == nbytes
    assert set(types) <= {tensor.kind for tensor in header.tensors.values()}


def test_a_plan_has_the_file_as_it_is_in_the_toolkit_and_in_llama_cpp(machine, tmp_path):  # noqa: F811
    """At 10 GB/s for each type of blocks, a token in memory takes the bytes of its layers over that."""
    target = target_of("llama", tmp_path, "Q4_0", hidden_size=256, intermediate_size=512)
    found = plan(target, GB)
    table = found.table.set_index("way")
    ours, rival = (way.name for way in files.ways_of_file(target.file, target.shape))
    assert (ours.startswith("as it is, "), rival) == (True, f"llama.cpp, {ours}")
    assert (table.loc[[ours, rival], "relative"] == 1).all()
    assert not table.loc[[ours, rival], "guess"].any()
    memory = files.ways_of_file(target.file, target.shape)[0].file.memory  # tiny matrices fill no whole blocks
    assert table.loc[ours, "tokens_s"] == pytest.approx(10 * GB / memory.units / memory.unit_bytes)
    assert found.choices[0].way == ours
    (run,) = found.choices[0].commands
    assert run == f'sparse-offload run {target.file} --dram 1000MB --prompt "The library of Alexandria"'


def test_a_file_that_the_toolkit_cannot_run_as_it_is_has_llama_cpps_row_alone(tmp_path, monkeypatch):
    monkeypatch.setattr("toolkit.storage.gguf_store.FAMILIES", {})
    monkeypatch.setattr(files, "architecture_of", lambda header: None)
    target = target_of("llama", tmp_path, "Q8_0")
    (rival,) = [way for way in target.ways if way.file]
    assert rival.name.startswith("llama.cpp, as it is")

"""Models that are read from disk are evaluated block by block: the same numbers, and each block is read once."""

from collections import Counter

import pytest
import torch
from gguf_files import CASES, write

import toolkit as tk
from tests.families import WORDS, load_family
from toolkit.api.quality import in_step
from toolkit.errors import UserError
from toolkit.models.loading import load_model, open_model
from toolkit.models.on_demand import is_on_demand
from toolkit.models.safetensors_source import SafetensorsSource
from toolkit.offload.model import OffloadedModel
from toolkit.offload.placement import LayerMap
from toolkit.quality import evaluate_tasks, harness
from toolkit.quality.local_tasks import Item, LocalTask
from toolkit.storage.packing import Linears, pack_model

TOKENS = torch.arange(128) * 11 % WORDS


@pytest.fixture
def folder(tmp_path):
    load_family("Qwen2", tmp_path / "model", torch.float32)
    return tmp_path / "model"


def test_perplexity_reads_each_block_of_a_large_model_once(folder, monkeypatch):
    whole, reads, tensors = load_model(str(folder))[0], Counter(), SafetensorsSource.tensors

    def counted(source, names):
        reads.update(name.split(".")[2] for name in names if ".layers." in name)
        return tensors(source, names)

    monkeypatch.setattr(SafetensorsSource, "tensors", counted)
    model, _ = load_model(str(folder), memory=1000)
    assert is_on_demand(model)
    reads.clear()
    found = tk.perplexity(model, TOKENS, 32, None)
    assert found.window_nll == tk.perplexity(whole, TOKENS, 32, None).window_nll
    assert found.windows == 4
    of_block = sum(".layers.0." in name for name in model.state_dict())
    assert reads == dict.fromkeys(map(str, range(model.config.num_hidden_layers)), of_block)


def test_perplexity_reads_each_layer_of_a_packed_folder_once(folder, tmp_path):
    model = load_model(str(folder), torch.bfloat16)[0]
    layers = model.config.num_hidden_layers
    pack_model(model, tmp_path / "packed", Linears(("dense",)))
    where = LayerMap(0, 0, layers)
    with OffloadedModel.open(tmp_path / "packed", placement=where, policy="sequential", verify=False) as opened:
        found = tk.perplexity(opened, TOKENS, 32, None)
        reads = [span.layer for span in opened.timeline.spans if span.stage == "read"]
    assert found.window_nll == tk.perplexity(model, TOKENS, 32, None).window_nll
    assert [reads.count(number) for number in range(layers)] == [1] * layers


def test_a_place_is_opened_within_memory(folder, tmp_path):
    expected = tk.perplexity(load_model(str(folder))[0], TOKENS, 32)
    assert tk.perplexity(str(folder), TOKENS, 32, memory="1MB") == expected
    assert tk.perplexity(folder, TOKENS, 32) == expected
    model, tokenizer = load_model(str(folder))
    pack_model(model, tmp_path / "packed", Linears(("dense",)), tokenizer=tokenizer)
    assert tk.perplexity(tmp_path / "packed", TOKENS, 32, memory="600MB") == expected
    for place, memory in ((folder, 1), (tmp_path / "packed", "1MB")):
        with pytest.raises(UserError, match=r"give more|is too small"):
            tk.perplexity(place, TOKENS, 32, memory=memory)
    with pytest.raises(UserError, match=r"is open already"):
        tk.perplexity(load_model(str(folder))[0], TOKENS, 32, memory="1GB")


def test_a_gguf_file_is_dequantised_in_inference_mode(tmp_path):
    write(CASES["llama"].model(), CASES["llama"], file := tmp_path / "model.gguf", "Q8_0")
    expected = tk.perplexity(load_model(str(file))[0], TOKENS, 32)
    assert tk.perplexity(file, TOKENS, 32, memory="1MB") == expected


def test_tasks_run_in_step_give_the_same_scores(folder, monkeypatch):
    items = [Item(f"{n} {n + 1}", (str(n), str(n + 2), f"{n + 3} 7"), n % 3) for n in range(20)]
    monkeypatch.setitem(harness.LOCAL_TASKS, "numbers", LocalTask(lambda: items, 3))
    (whole, tokenizer), (model, _) = load_model(str(folder)), open_model(str(folder))
    expected = evaluate_tasks(whole, tokenizer, ["numbers"], batch_size=7)
    passes, run = [], in_step(model)
    found = evaluate_tasks(
        model, tokenizer, ["numbers"], batch_size=7, run=lambda calls: passes.append(calls) or run(calls)
    )
    assert found.equals(expected)
    assert [len(calls) for calls in passes] == [9]  # 60 requests

"""Ways of running one packed model, side by side; and the packed model as an ordinary one in memory."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.models.test_gguf import write
from toolkit.errors import UserError
from toolkit.measure import side_by_side
from toolkit.measure.side_by_side import planned_rivals, token_rates
from toolkit.offload.model import unpack_model
from toolkit.storage.packing import pack_model
from toolkit.storage.store import Store

PROMPT = torch.tensor([[7, 100, 55]])


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A tiny model, packed, with a cache of its own; llama.cpp takes no part."""
    monkeypatch.setattr("toolkit.paths.cache_dir", lambda: tmp_path / "cache")
    monkeypatch.setattr("toolkit.measure.llama_cpp.missing", lambda limited: "absent")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=200, tie_word_embeddings=True, **sizes)).bfloat16().eval()
    for parameter in model.parameters():
        parameter.data[torch.rand_like(parameter) < 0.5] = 0
    pack_model(model, tmp_path / "packed")
    return tmp_path / "packed", model


@torch.no_grad()
def test_an_unpacked_model_is_the_packed_one_to_the_bit(folder):
    place, model = folder
    found = unpack_model(Store.open(place), "endor")
    assert found.dtype == torch.bfloat16
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in found.state_dict().items())
    assert torch.equal(found(PROMPT).logits, model(PROMPT).logits)


def test_every_way_has_a_row_with_what_it_reads(folder):
    place, model = folder
    table, reasons = token_rates(place, "endor", model, PROMPT, 3, 10_000_000)
    assert table["way"].tolist() == ["dense", "dense_packed", "endor", "endor_packed"]
    assert (table["tokens_per_s_low"] <= table["tokens_per_s"]).all()
    assert (table["tokens_per_s"] <= table["tokens_per_s_high"]).all()
    assert (table["read_mb"] == 0).all()  # the tiny model fits
    assert (table["dram_mb"] > 0).all()
    assert reasons == []
    assert not [*(place.parent / "cache" / "side_by_side").iterdir()]


def test_ways_that_do_not_fit_are_named_with_what_they_need(folder):
    with pytest.raises(UserError, match=r"dense: a DRAM budget .* MB are needed.*endor: "):
        token_rates(folder[0], "endor", folder[1], PROMPT, 3, 1000)


def test_rivals_are_known_before_anything_runs(folder, monkeypatch, tmp_path):
    """A file of one's own is raced whatever the architecture; files are written of Llama models alone."""
    place, _ = folder
    assert planned_rivals(place) == ({}, ["llama.cpp: absent"])
    monkeypatch.setattr("toolkit.measure.llama_cpp.missing", lambda limited: None)
    assert planned_rivals(place) == (dict.fromkeys(side_by_side.TYPES), [])
    file = tmp_path / "own.gguf"
    write(file, kind="Q8_0", words=200)
    assert planned_rivals(place, gguf=file)[0]["llama.cpp Q8_0"] == file
    config = place / "model" / "config.json"
    config.write_text(config.read_text().replace('"llama"', '"qwen2"'))
    rivals, (reason,) = planned_rivals(place, gguf=file)
    assert rivals == {"llama.cpp Q8_0": file}
    assert "Llama models only, not of 'qwen2'" in reason

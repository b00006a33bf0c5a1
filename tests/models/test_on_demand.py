"""Models whose blocks are in memory only while they are used compute what the whole models compute."""

from pathlib import Path

import pytest
import torch
from gguf_files import CASES, write
from torch import nn

from tests.families import FAMILIES, WORDS, load_family
from toolkit.errors import UserError
from toolkit.models import decoder_blocks
from toolkit.models.loading import load_model, open_model
from toolkit.models.on_demand import is_on_demand, present
from toolkit.models.streams import run_in_step
from toolkit.quality import perplexity

IDS = (torch.arange(40) * 7 % WORDS).view(2, 20)
# tied, transposed matrices, heads with biases, several streams, experts, tensors in a form of their own
VARIED = [
    "Llama, tied", "GPT-2", "Phi", "OPT, as 350m", "Gemma3n", "GptOss", "JetMoE", "Mamba",
]  # fmt: skip


def held_bytes(block: nn.Module) -> int:
    """The bytes of a block's tensors that are in memory."""
    storages = {it.untyped_storage().data_ptr(): it.untyped_storage().nbytes() for it in block.state_dict().values()}
    return sum(storages.values())


@pytest.mark.parametrize("number", range(len(VARIED)))
def test_the_same_logits_as_of_the_whole_model(tmp_path, number):
    family, dtype = VARIED[number], (torch.float32, torch.bfloat16)[number % 2]
    whole = load_family(family, tmp_path / "model", dtype)
    model, _ = open_model(str(tmp_path / "model"), dtype)
    assert is_on_demand(model)
    assert torch.equal(model(IDS).logits, whole(IDS).logits)
    assert model.config.to_json_string() == whole.config.to_json_string()
    for name, tensor in whole.state_dict().items():
        assert (tensor.shape, tensor.dtype) == (model.state_dict()[name].shape, model.state_dict()[name].dtype), name


def test_one_block_is_in_memory_at_a_time(tmp_path):
    whole = load_family("Llama, tied", tmp_path / "model", torch.float32)
    model, _ = open_model(str(tmp_path / "model"), torch.float32)
    blocks, most = decoder_blocks(model), []

    def watch(*_) -> None:
        most.append([held_bytes(block) for block in blocks])

    for block in blocks:
        block.mlp.register_forward_hook(watch)
    model(IDS)
    size = held_bytes(decoder_blocks(whole)[0])
    gone = held_bytes(blocks[0])
    assert gone < size / 100
    assert most == [[size, gone], [gone, size]]
    assert sum(tensor.untyped_storage().nbytes() for tensor in model.get_input_embeddings().parameters()) == 4


def test_a_block_that_is_used_stays_and_changes_are_lost(tmp_path):
    load_family("Llama, tied", tmp_path / "model", torch.float32)
    model, _ = open_model(str(tmp_path / "model"), torch.float32)
    before = model(IDS).logits
    with present(decoder_blocks(model)[0]) as block:
        block.mlp.up_proj.weight.mul_(2)
        assert not torch.equal(model(IDS).logits, before)
    assert torch.equal(model(IDS).logits, before)
    assert decoder_blocks(model)[0].mlp.up_proj.weight.isnan().all()


def test_passes_in_step_give_the_same_perplexity(tmp_path):
    whole = load_family("Qwen2", tmp_path / "model", torch.float32)
    model, _ = open_model(str(tmp_path / "model"), torch.float32)
    tokens = torch.arange(96) * 11 % WORDS
    found = perplexity(model, tokens, 32, run=lambda passes: run_in_step(model, passes))
    assert found.window_nll == pytest.approx(perplexity(whole, tokens, 32).window_nll)


def test_a_gguf_file_gives_the_same_logits(tmp_path, monkeypatch):
    monkeypatch.setenv("TOOLKIT_CACHE_DIR", str(tmp_path / "cache"))
    write(CASES["llama"].model(), CASES["llama"], file := tmp_path / "model.gguf", "Q8_0")
    whole, tokenizer = load_model(str(file), torch.bfloat16)
    model, other = open_model(str(file), torch.bfloat16)
    assert is_on_demand(model)
    assert torch.equal(model(IDS[:1]).logits, whole(IDS[:1]).logits)
    assert model.config.to_json_string() == whole.config.to_json_string()
    assert other.get_vocab() == tokenizer.get_vocab()


def test_a_model_larger_than_free_memory_is_loaded_on_demand(tmp_path, monkeypatch):
    whole = load_family("Qwen2", tmp_path / "model", torch.float32)
    weights = sum(tensor.numel() for tensor in whole.parameters())
    for free, on_demand in {4 * weights - 1: True, 4 * weights: False}.items():
        monkeypatch.setattr("toolkit.memory_limits.free_bytes", lambda free=free: free)
        assert is_on_demand(load_model(str(tmp_path / "model"), torch.float32)[0]) == on_demand


def test_what_load_model_refuses_is_refused(tmp_path):
    with pytest.raises(UserError) as whole:
        load_family("BERT", tmp_path / "BERT", torch.float32)
    with pytest.raises(UserError) as opened:
        open_model(str(tmp_path / "BERT"), torch.float32)
    assert str(opened.value) == str(whole.value)
    load_family("Qwen2", tmp_path / "Qwen2", torch.float32)
    drop_a_tensor(tmp_path / "Qwen2")
    with pytest.raises(UserError, match=r"its files lack model\.layers\.1\.mlp\.up_proj\.weight; compare"):
        open_model(str(tmp_path / "Qwen2"), torch.float32)


def drop_a_tensor(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.slow
def test_every_family(tmp_path):
    """The families that `VARIED` leaves out, in one type."""
    for family in FAMILIES.keys() - {*VARIED, "BERT", "RoBERTa", "BART"}:
        whole = load_family(family, tmp_path / family, torch.bfloat16)
        model, _ = open_model(str(tmp_path / family), torch.bfloat16)
        assert torch.equal(model(IDS).logits, whole(IDS).logits), family

"""A model whose configuration does not describe its tensors is refused before it is written."""

import ast

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel

from tests.families import load_family
from toolkit import paths
from toolkit.errors import UserError
from toolkit.interchange import save_model
from toolkit.models.skeleton import empty_model, read_config
from toolkit.storage.packing import pack_model

SIZES = {"vocab_size": 61, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}


def llama(tied: bool) -> LlamaForCausalLM:
    return LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=tied)).requires_grad_(False)


def said_tied() -> LlamaForCausalLM:
    """The weights hold a head of their own."""
    model = llama(tied=False)
    model.config.tie_word_embeddings = True
    return model


def said_untied() -> LlamaForCausalLM:
    """The head is the embedding."""
    model = llama(tied=True)
    model.config.tie_word_embeddings = False
    return model


def other_size() -> LlamaForCausalLM:
    model = llama(tied=True)
    model.config.intermediate_size = 32
    return model


WRONG = {
    said_tied: r"lm_head.weight is 61 × 16, but its config.json tells absent or shared; .*tie_word_embeddings",
    said_untied: r"lm_head.weight is absent or shared, but its config.json tells 61 × 16",
    other_size: r"layers.0.mlp.down_proj.weight is 16 × 24, but its config.json tells 16 × 32",
    lambda: LlamaModel(LlamaConfig(**SIZES)): r"LlamaModel could not be opened again",
}


def test_what_would_not_open_is_not_written(tmp_path):
    for make, told in WRONG.items():
        for write in (pack_model, save_model):
            with pytest.raises(UserError, match=told):
                write(make(), tmp_path / "out")
            assert list(tmp_path.iterdir()) == []


def test_every_call_that_could_run_a_folders_code_forbids_it():
    """`AutoModel…from_pretrained` asks whether to run code that a folder names, unless it is told not to."""
    found = 0
    for file in [*(paths.root() / "toolkit").rglob("*.py"), *(paths.root() / "benchmarks").rglob("*.py")]:
        for call in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute):
                owner = ast.unparse(call.func.value).rpartition(".")[2]
                if call.func.attr in ("from_pretrained", "from_config") and owner.startswith("Auto"):
                    found += 1
                    assert "NO_CODE" in ast.unparse(call), f"{file}:{call.lineno}: pass **hub.NO_CODE"
    assert found > 8


@pytest.mark.parametrize("family", ["GPT-J", "Gemma2"])
def test_buffers_are_those_of_transformers(tmp_path, family):
    """GPT-J has a table of sines; Gemma2 has buffers of two types."""
    expected = load_family(family, tmp_path, torch.bfloat16)
    expected.config.save_pretrained(tmp_path)
    shapes = [tensor.shape for tensor in expected.state_dict().values()]
    buffers = dict(empty_model(read_config(tmp_path, shapes), lambda outline: None).named_buffers())
    assert buffers.keys() == dict(expected.named_buffers()).keys()
    for name, buffer in expected.named_buffers():
        assert buffers[name].dtype == buffer.dtype
        assert torch.equal(buffers[name], buffer)

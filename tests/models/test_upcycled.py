"""A Mixtral made of a dense Llama and low-rank experts."""

import pytest
import torch
from transformers import AutoModelForCausalLM, MixtralForCausalLM

from tests.models.test_models import LLAMA, small
from toolkit.models.experts import decoder_experts
from toolkit.models.ffn import decoder_ffns
from toolkit.models.plain import as_stored, plain
from toolkit.models.skeleton import check_reopens
from toolkit.models.upcycled import as_mixtral

TOKENS = torch.arange(20).view(1, -1) % 64


def dense():
    return small("Llama", **LLAMA | {"initializer_range": 0.2}).eval().requires_grad_(False)


def random_parts(scale=0.1):
    shapes = {
        "router": (2, 4, 32), "gate_up_left": (2, 4, 96, 3), "gate_up_right": (2, 4, 3, 32),
        "down_left": (2, 4, 32, 3), "down_right": (2, 4, 3, 48),
    }  # fmt: skip
    torch.manual_seed(1)
    return {name: scale * torch.randn(shape) for name, shape in shapes.items()}


def test_without_differences_it_is_the_dense_model():
    model, parts = dense(), random_parts()
    parts |= {name: parts[name] * 0 for name in ("gate_up_left", "down_left")}
    mixtral = as_mixtral(model, parts, 2, torch.float32)
    assert isinstance(mixtral, MixtralForCausalLM)
    torch.testing.assert_close(mixtral(TOKENS).logits, model(TOKENS).logits, rtol=1e-4, atol=1e-4)


def test_each_expert_is_the_ffn_and_its_difference():
    model, parts = dense(), random_parts()
    experts = decoder_experts(as_mixtral(model, parts, 2, torch.float32))[1]
    assert experts.gate.form == "renormalised"
    ffn = decoder_ffns(model)[1]
    for expert in range(4):
        gate, up, down = experts.matrices(expert)
        difference = parts["gate_up_left"][1, expert] @ parts["gate_up_right"][1, expert]
        torch.testing.assert_close(gate, ffn.gate.weight + difference[:48])
        torch.testing.assert_close(up, ffn.up.weight + difference[48:])
        torch.testing.assert_close(
            down.T, ffn.down.weight + parts["down_left"][1, expert] @ parts["down_right"][1, expert]
        )


@pytest.mark.parametrize("tied", [True, False])
def test_transformers_opens_it_as_it_was(tmp_path, tied):
    model = small("Llama", **LLAMA | {"tie_word_embeddings": tied}).requires_grad_(False)
    mixtral = as_mixtral(model, random_parts(), 2, torch.bfloat16)
    assert (mixtral.lm_head.weight is mixtral.model.embed_tokens.weight) == tied
    assert mixtral.model.embed_tokens.weight is not model.model.embed_tokens.weight
    check_reopens(mixtral)
    mixtral.save_pretrained(tmp_path, state_dict=dict(as_stored(mixtral)))
    opened = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert torch.equal(plain(opened)(TOKENS).logits, mixtral(TOKENS).logits)

"""Activations by the names of configurations, against transformers' own."""

import pytest
import torch
from transformers.activations import ACT2FN

from tests.sparsity.conftest import _small, tiny, tokens  # noqa: F401
from toolkit.errors import UserError
from toolkit.models.activation import ACTIVATIONS, activation, activation_name, replaced


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_are_those_of_transformers_and_map_zero_to_zero(name):
    x = torch.linspace(-4, 4, 41)
    assert torch.allclose(activation(name)(x), ACT2FN[name](x), atol=1e-6)
    assert activation(name)(torch.zeros(1)).item() == 0


def test_a_model_names_its_activation(tiny):  # noqa: F811
    assert [activation_name(tiny(family)) for family in ("llama", "opt", "gemma2")] == [
        "silu",
        "relu",
        "gelu_pytorch_tanh",
    ]
    model = tiny("llama")
    model.config.hidden_act = "mystery"
    with pytest.raises(UserError, match="unknown activation 'mystery'"):
        activation_name(model)


@torch.no_grad()
def test_another_activation_for_a_while(tiny, tokens):  # noqa: F811
    model, window = tiny("llama"), tokens[None, :16]
    own, ffn = model(window).logits, model.model.layers[0].mlp
    with replaced(model, [torch.nn.ReLU()] * 3):
        x = torch.randn(3, ffn.gate_proj.in_features)
        expected = ffn.down_proj(ffn.gate_proj(x).clamp(min=0) * ffn.up_proj(x))
        assert torch.allclose(ffn(x), expected, atol=1e-6)
        assert not torch.equal(model(window).logits, own)
    assert torch.equal(model(window).logits, own)

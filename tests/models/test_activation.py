"""Activations by the names of configurations, against transformers' own."""

import pytest
import torch
from transformers.activations import ACT2FN

from tests.sparsity.conftest import _small, tiny, tokens  # noqa: F401
from toolkit.errors import UserError
from toolkit.models.activation import ACTIVATIONS, activation, activation_name, replace_for_good, replaced_by


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


@pytest.mark.parametrize("family", ["llama", "gemma2"])
@torch.no_grad()
def test_another_activation_for_a_while_and_for_good(tiny, tokens, family, tmp_path):  # noqa: F811
    model, window = tiny(family), tokens[None, :16]
    own, ffn = model(window).logits, model.model.layers[0].mlp
    with replaced_by(model, None):
        assert torch.equal(model(window).logits, own)
    with replaced_by(model, "relu"):
        x = torch.randn(3, ffn.gate_proj.in_features)
        expected = ffn.down_proj(ffn.gate_proj(x).clamp(min=0) * ffn.up_proj(x))
        assert torch.allclose(ffn(x), expected, atol=1e-6)
        other = model(window).logits
    assert torch.equal(model(window).logits, own)
    replace_for_good(model, "relu")
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path).eval()
    assert not torch.equal(other, own)
    assert torch.equal(model(window).logits, other)
    assert torch.allclose(again(window).logits, other, atol=1e-6)
    assert activation_name(again) == "relu"
    with pytest.raises(UserError, match="unknown activation 'rellu'"):
        replace_for_good(model, "rellu")

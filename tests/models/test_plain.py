"""A model whose experts are linears computes what transformers' own does."""

import pytest
import torch
import transformers
from torch import nn

from tests.families import FAMILIES, randomise
from toolkit.models.plain import RoutedExperts, as_stored, plain

OTHERWISE = ("GPT-2", "Mixtral", "GptOss", "GraniteMoE", "DeepSeek-V3")


def made(family):
    kind, settings = FAMILIES[family]
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, f"{kind}Config")(**settings)).eval()
    for parameter in model.parameters():
        randomise(parameter.data)
    return model


@pytest.mark.parametrize("family", OTHERWISE)
@torch.no_grad()
def test_logits_and_stored_tensors_are_transformers_own(family):
    tokens = torch.arange(1, 40)[None]
    expected, other = made(family)(tokens).logits, made(family)
    model = plain(made(family))
    assert all(parameter.ndim < 3 for parameter in model.parameters())
    assert (model(tokens).logits - expected).abs().max() < 1e-4 * expected.std()
    for parameter in other.parameters():
        parameter.zero_()
    report = other.load_state_dict(dict(as_stored(model)), strict=False)
    other.tie_weights()
    assert not report.unexpected_keys
    assert torch.equal(other(tokens).logits, expected)


def test_experts_share_the_memory_of_the_fused_parameters():
    model = made("Mixtral")
    fused = model.model.layers[0].mlp.experts.down_proj.data
    plain(model).model.layers[0].mlp.experts[2].down.weight.data.fill_(7)
    assert (fused[2] == 7).all()
    assert not (fused[1] == 7).any()


def test_a_class_that_computes_otherwise_stays():
    model = made("Mixtral")
    kind = type(model.model.layers[0].mlp.experts)

    class Doubled(kind):
        def forward(self, *arguments):
            return 2 * kind.forward(self, *arguments)

    model.model.layers[0].mlp.experts.__class__ = Doubled
    plain(model)
    assert isinstance(model.model.layers[0].mlp.experts, Doubled)
    assert isinstance(model.model.layers[1].mlp.experts, RoutedExperts)
    assert isinstance(model.model.layers[0].mlp.experts.down_proj, nn.Parameter)

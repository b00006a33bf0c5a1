import copy

import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM

from tests import naive_quantization as naive
from tests.offload.conftest import FAMILIES, GATED, pruned
from toolkit.errors import UserError
from toolkit.models import decoder_blocks, decoder_linears
from toolkit.quantization.smoothquant import factors, int8_activations, round_to_int8, smooth, smoothing_factors

pytestmark = pytest.mark.usefixtures("one_thread")
LENGTH = 16
TOKENS = torch.randint(0, 61, (6 * LENGTH,), generator=torch.Generator().manual_seed(1))
WINDOWS = TOKENS.view(-1, LENGTH)
every_family = pytest.mark.parametrize("family", FAMILIES)


def with_outliers(family, dtype=torch.float32):
    """A pruned model, some channels of whose norms are much larger than the others."""
    model = pruned(family, torch.float32)
    spread = torch.Generator().manual_seed(2)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1 and "norm" in name:
            parameter.mul_(torch.randn(parameter.shape, generator=spread).exp())
            parameter[::11] *= 30
    return model.to(dtype)


def linears(model):
    return {
        f"{number}.{name}": linear
        for number, block in enumerate(decoder_blocks(model))
        for name, linear in decoder_linears(block).items()
    }


def masks(model):
    return {name: linear.weight == 0 for name, linear in linears(model).items()}


def logits(model):
    return model(WINDOWS).logits


def test_factors_by_hand():
    found = factors(torch.tensor([16.0, 1.0, 0.0, 9.0]), torch.tensor([1.0, 4.0, 2.0, 0.0]), alpha=0.5)
    assert found.tolist() == [4.0, 0.5, 1.0, 1.0]
    assert factors(torch.tensor([16.0]), torch.tensor([2.0]), alpha=1).tolist() == [16.0]
    assert factors(torch.tensor([16.0]), torch.tensor([2.0]), alpha=0).tolist() == [0.5]


@every_family
def test_factors_are_those_of_every_token_one_by_one(family):
    model = with_outliers(family)
    expected = naive.factors(model, family, WINDOWS, 0.8)
    found = smoothing_factors(model, WINDOWS, 0.8)
    assert found.keys() == expected.keys()
    for name, factor in found.items():
        torch.testing.assert_close(factor, expected[name], rtol=1e-5, atol=0)


@every_family
def test_the_function_stays_and_the_factors_go_where_they_belong(family):
    model = with_outliers(family, torch.float64)
    before = copy.deepcopy(model)
    found = smooth(model, WINDOWS)
    scale = logits(before).abs().max()
    # rotary embeddings are float32 in any case
    assert (logits(model) - logits(before)).abs().max() <= 1e-6 * scale
    assert min(float(factor.max() / factor.min()) for factor in found.values()) > 3  # it was worth doing
    scaled = set()
    for prefix, block in naive.blocks(before):
        for norm, names in naive.READERS[family].items():
            factor = found[f"{prefix}.{norm}"]
            for name in names:
                scaled.add(f"{prefix}.{name}.weight")
                new, old = model.get_submodule(f"{prefix}.{name}").weight, block.get_submodule(name).weight
                torch.testing.assert_close(new, (old * factor).double())
            for part, old in block.get_submodule(norm).named_parameters():
                scaled.add(f"{prefix}.{norm}.{part}")
                torch.testing.assert_close(model.get_parameter(f"{prefix}.{norm}.{part}"), (old / factor).double())
    for name, parameter in before.named_parameters():
        assert name in scaled or torch.equal(model.get_parameter(name), parameter), name


@every_family
def test_zeros_survive_smoothing_and_rounding(family):
    model = with_outliers(family, torch.bfloat16)
    before = masks(model)
    smooth(model, WINDOWS)
    assert all(torch.equal(mask, before[name]) for name, mask in masks(model).items())
    round_to_int8(model)
    for name, mask in masks(model).items():
        assert (mask & before[name]).sum() == before[name].sum(), name


def test_rounded_weights_are_those_of_plain_python():
    model = with_outliers("llama", torch.bfloat16)
    before = copy.deepcopy(model)
    round_to_int8(model)
    for name, linear in linears(model).items():
        values, scales = naive.int8(linears(before)[name].weight)
        expected = values.to(torch.bfloat16) * scales[:, None]
        assert (linear.weight != expected).float().mean() < 0.02, name  # ties
        torch.testing.assert_close(linear.weight.float(), expected.float(), rtol=0, atol=float(scales.max()) * 1.01)
    assert torch.equal(model.lm_head.weight, before.lm_head.weight)


def test_activations_are_rounded_token_by_token_and_only_while_asked():
    model = with_outliers("opt")
    linear = linears(model)["1.fc2"]
    plain = logits(model)
    with int8_activations(model):
        rounded = logits(model)
        seen = naive.inputs(model, linear, WINDOWS[:1])  # a hook that runs after the rounding
    values, scales = naive.int8(seen)
    torch.testing.assert_close(seen, values * scales[:, None])
    assert not torch.equal(rounded, plain)
    assert torch.equal(logits(model), plain)


@pytest.mark.parametrize(("family", "wrong"), [("llama", False), ("gemma2", True)])
def test_a_loud_residual_neither_hides_a_wrong_fold_nor_spoils_a_right_one(family, wrong):
    """Hidden states some thousand times larger than what a block adds to them, which the norms make up for."""
    torch.manual_seed(0)
    gemma = Gemma2ForCausalLM(Gemma2Config(**GATED, head_dim=12, bos_token_id=None)) if wrong else None
    model = (gemma or with_outliers(family)).eval().requires_grad_(False)
    model.get_input_embeddings().weight.mul_(1e4)
    if wrong:
        with pytest.raises(UserError, match="smoothing changes"):
            smooth(model, WINDOWS)
    else:
        smooth(model, WINDOWS)

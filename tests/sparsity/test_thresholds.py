"""Thresholds against quantiles of all activations, and cut models against cut products."""

import pytest
import torch

from toolkit.errors import UserError
from toolkit.models.ffn import decoder_ffns
from toolkit.sparsity import Magnitudes, thresholded
from toolkit.sparsity.thresholds import run_decoder, watched


def outputs_of(model, windows):
    """All outputs of the neurons, [layers][tokens, neurons]."""
    found = [[] for _ in decoder_ffns(model)]
    with watched(model, lambda layer, outputs: found[layer].append(outputs.reshape(-1, outputs.shape[-1]))):
        for window in windows:
            run_decoder(model, window)
    return [torch.cat(parts) for parts in found]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("family", ["llama", "opt"])
@torch.no_grad()
def test_thresholds_are_the_quantiles(tiny, tokens, family, dtype):
    model = tiny(family).to(dtype)
    sizes = Magnitudes.measure(model, tokens, sequence_length=16)
    shares = [0.3, 0.9, 0.75]
    limits = sizes.thresholds(shares)
    dense = outputs_of(model, tokens.view(-1, 16))
    for outputs, share, limit, reached in zip(dense, shares, limits, sizes.sparsity(limits), strict=True):
        magnitudes = outputs.float().abs().flatten()
        zeros = (magnitudes <= limit).double().mean().item()
        natural = (magnitudes == 0).double().mean().item()
        assert reached == pytest.approx(zeros)
        assert zeros >= share
        if natural >= share:
            assert limit == 0
        else:  # no smaller number of bf16 would do
            below = (limit.view(torch.int32) >> 16 << 16).view(torch.float32)
            assert (magnitudes < below).double().mean() < share


@torch.no_grad()
def test_shares_of_no_zeros_cut_nothing(tiny, tokens):
    model = tiny("llama")
    limits = Magnitudes.measure(model, tokens, sequence_length=16).thresholds(0)
    assert limits.tolist() == [0, 0, 0]
    dense = model(tokens[None, :16]).logits
    with thresholded(model, limits):
        assert torch.equal(model(tokens[None, :16]).logits, dense)


@pytest.mark.parametrize("family", ["llama", "opt"])
@torch.no_grad()
def test_a_cut_model_computes_with_zeros(tiny, tokens, family):
    """The same as with a down projection that cuts its own input; and the model is whole again afterwards."""
    model, other = tiny(family), tiny(family)
    limits = Magnitudes.measure(model, tokens, sequence_length=16).thresholds(0.8)
    limits[0] = outputs_of(model, tokens[None, :16])[0].abs().flatten().kthvalue(300).values  # one lies on it, and goes
    dense = model(tokens[None, :16]).logits
    for ffn, limit in zip(decoder_ffns(other), limits, strict=True):
        down = ffn.down.forward
        ffn.down.forward = lambda x, down=down, limit=limit: down(torch.where(x.abs() > limit, x, 0))
    with thresholded(model, limits):
        cut = model(tokens[None, :16]).logits
    assert torch.equal(cut, other(tokens[None, :16]).logits)
    assert not torch.equal(cut, dense)
    assert torch.equal(model(tokens[None, :16]).logits, dense)


def test_bad_arguments_are_refused(tiny, tokens):
    model = tiny("llama")
    sizes = Magnitudes.measure(model, tokens, sequence_length=16)
    for shares, told in ((1.0, "share of zeros 1.0"), ([0.5, 0.5], "2 shares of zeros for 3 layers")):
        with pytest.raises(UserError, match=told):
            sizes.thresholds(shares)
    with pytest.raises(UserError, match="2 thresholds for 3 decoder blocks"), thresholded(model, torch.zeros(2)):
        pass
    with torch.no_grad():
        decoder_ffns(model)[1].up.weight[0, 0] = torch.inf
    with pytest.raises(UserError, match="activations are not finite"):
        Magnitudes.measure(model, tokens, sequence_length=16)


@torch.no_grad()
def test_thresholds_on_the_gate_cut_by_the_gate_alone(tiny, tokens):
    """The same as with a gate whose small activations are zero."""
    model, other = tiny("llama"), tiny("llama")
    limits = Magnitudes.measure(model, tokens, sequence_length=16, criterion="gate").thresholds(0.6)
    for ffn, limit in zip(decoder_ffns(other), limits, strict=True):
        gate = ffn.gate.forward

        def cut(x, gate=gate, limit=limit):
            found = gate(x)
            return torch.where(torch.nn.functional.silu(found).abs() > limit, found, 0)

        ffn.gate.forward = cut
    with thresholded(model, limits, "gate"):
        zeros = torch.cat([outputs.flatten() for outputs in outputs_of(model, tokens.view(-1, 16))]) == 0
        assert torch.equal(model(tokens[None, :16]).logits, other(tokens[None, :16]).logits)
    assert zeros.float().mean() == pytest.approx(0.6, abs=0.05)


def test_criteria_that_cannot_be_are_refused(tiny, tokens):
    with pytest.raises(UserError, match="unknown criterion 'up'"), thresholded(tiny(), torch.zeros(3), "up"):
        pass
    with pytest.raises(UserError, match="no linear that is their gate"):
        Magnitudes.measure(tiny("opt"), tokens, sequence_length=16, criterion="gate")

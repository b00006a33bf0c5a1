"""Thresholds against quantiles of all activations, and cut models against cut products."""

import pytest
import torch

from toolkit.models.ffn import decoder_ffns
from toolkit.sparsity import Magnitudes, thresholded
from toolkit.sparsity.thresholds import fatrelu, gate_limits, run_decoder, watched


def outputs_of(model, windows):
    """All outputs of the neurons, [layers][tokens, neurons]."""
    found = [[] for _ in decoder_ffns(model)]
    with watched(model, lambda layer, outputs: found[layer].append(outputs.reshape(-1, outputs.shape[-1]))):
        for window in windows:
            run_decoder(model, window)
    return [torch.cat(parts) for parts in found]


@pytest.mark.parametrize(("family", "dtype"), {"llama": torch.bfloat16, "opt": torch.float32}.items())
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


@pytest.mark.parametrize("family", ["llama", "opt", "gemma2"])
@torch.no_grad()
def test_the_ffn_computes_with_it(tiny, tokens, family):
    model = tiny(family)
    dense = model(tokens[None, :16]).logits
    limits = gate_limits(model, tokens.view(-1, 16), 0.8)
    ffn, seen = decoder_ffns(model)[1], {}
    for name, part in {"gate": ffn.gate or ffn.up, "up": ffn.up, "down": ffn.down}.items():
        part.register_forward_hook(lambda _, args, out, name=name: seen.update({name: (args[0], out)}))
    with fatrelu(model, limits):
        assert not torch.equal(model(tokens[None, :16]).logits, dense)
    gate, up = seen["gate"][1], seen["up"][1] if ffn.gate else 1.0
    assert torch.allclose(seen["down"][0], torch.where(gate > limits[1], gate, 0.0) * up)
    assert torch.equal(model(tokens[None, :16]).logits, dense)


def test_limits_are_those_of_begun_windows(tiny, tokens):
    windows = tokens.view(-1, 16)
    begun = windows.index_fill(1, torch.tensor(0), 5)
    assert torch.equal(
        gate_limits(tiny("gemma2", bos_token_id=5), windows, 0.8), gate_limits(tiny("gemma2"), begun, 0.8)
    )

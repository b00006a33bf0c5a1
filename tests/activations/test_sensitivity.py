"""Losses foretold from gradients, against those measured one layer and level at a time."""

from itertools import product

import pytest
import torch

from toolkit.activations import Magnitudes
from toolkit.activations.sensitivity import fisher_losses
from toolkit.activations.thresholds import thresholded

LEVELS = [0.2, 0.4, 0.6]


def measured(model, sizes, windows):
    """The divergence that each layer adds alone, in nats a token."""
    losses = torch.zeros(len(sizes.counts), len(LEVELS), dtype=torch.float64)
    for layer, level in product(*map(range, losses.shape)):
        alone = torch.full((len(losses),), -1.0)
        alone[layer] = sizes.thresholds(LEVELS[level])[layer]
        for window in windows:
            theirs = model(window[None]).logits.double().softmax(-1)
            with thresholded(model, alone):
                ours = model(window[None]).logits.double().softmax(-1)
            losses[layer, level] += (theirs * (theirs / ours).log()).sum() / windows.numel()
    return losses


@pytest.mark.parametrize("family", ["llama", "opt"])
@torch.no_grad()
def test_small_losses_are_foretold(tiny, tokens, family):
    """The mean over many drawn texts. What is left out: that errors of tokens correlate, and higher orders."""
    model = tiny(family)
    windows = tokens.view(-1, 16)
    sizes = Magnitudes.measure(model, tokens, sequence_length=16)
    found = torch.stack([fisher_losses(model, sizes, windows, LEVELS, seed) for seed in range(20)]).mean(0)
    expected = measured(model, sizes, windows)
    some = expected > 1e-6  # a ReLU's own zeros cost nothing
    assert not found[~some].any()
    assert (found[some] / expected[some]).log().abs().max() < 1.0


@torch.no_grad()
def test_no_zeros_cost_nothing_and_a_seed_is_repeatable(tiny, tokens):
    model = tiny("llama")
    windows = tokens.view(-1, 16)
    sizes = Magnitudes.measure(model, tokens, sequence_length=16)
    assert not fisher_losses(model, sizes, windows, [0.0]).any()
    twice = [fisher_losses(model, sizes, windows, LEVELS, seed=1) for _ in range(2)]
    assert torch.equal(*twice)

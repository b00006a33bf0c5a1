"""Shares of zeros by layer: losses foretold against those measured, and zeros shared out against every way there is."""

from itertools import product

import pytest
import torch

from toolkit.sparsity import Magnitudes, share_out
from toolkit.sparsity.shares import LEVELS, fisher_losses, shares
from toolkit.sparsity.thresholds import thresholded

SMALL = [0.2, 0.4, 0.6]


def measured(model, sizes, windows):
    """The divergence that each layer adds alone, in nats a token."""
    losses = torch.zeros(len(sizes.counts), len(SMALL), dtype=torch.float64)
    for layer, level in product(*map(range, losses.shape)):
        alone = torch.full((len(losses),), -1.0)
        alone[layer] = sizes.thresholds(SMALL[level])[layer]
        for window in windows:
            theirs = model(window[None]).logits.double().softmax(-1)
            with thresholded(model, alone):
                ours = model(window[None]).logits.double().softmax(-1)
            losses[layer, level] += (theirs * (theirs / ours).log()).sum() / windows.numel()
    return losses


@pytest.mark.parametrize("family", ["llama", "opt"])
@torch.no_grad()
def test_small_losses_are_foretold(tiny, tokens, family):
    """The mean over many drawn texts. The estimate leaves out that errors of tokens correlate, and higher orders."""
    model = tiny(family)
    windows = tokens.view(-1, 16)
    sizes = Magnitudes.measure(model, tokens, sequence_length=16)
    found = torch.stack([fisher_losses(model, sizes, windows, SMALL, seed) for seed in range(20)]).mean(0)
    expected = measured(model, sizes, windows)
    some = expected > 1e-6  # a ReLU's own zeros cost nothing
    assert not found[~some].any()
    assert (found[some] / expected[some]).log().abs().max() < 1.0


EVEN = [0.5, 0.6, 0.7, 0.8]


def test_worked_example():
    """Steps up cost 1, 2, 3 and 10, 20, 30: the first layer takes all of its three, then the second one of its."""
    losses = torch.tensor([[0.0, 1, 3, 6], [0, 10, 30, 60]])
    assert share_out(losses, EVEN, 0.65) == [0.8, 0.5]
    assert share_out(losses, EVEN, 0.7) == [0.8, 0.6]
    assert share_out(losses, EVEN, 0.66) == [0.8, 0.6]  # less than one step above
    assert share_out(losses, EVEN, 0.5) == [0.5, 0.5]
    assert share_out(losses, EVEN, 0.8) == [0.8, 0.8]


def test_nothing_is_better_where_losses_rise_ever_faster():
    generator = torch.Generator().manual_seed(0)
    steps = torch.rand(4, 3, generator=generator).sort(dim=1).values
    losses = torch.cat([torch.zeros(4, 1), steps.cumsum(1)], dim=1).double()
    for zeros in (0.525, 0.6, 0.7, 0.75):
        found = share_out(losses, EVEN, zeros)
        assert sum(found) / 4 >= zeros - 1e-9
        lost = sum(losses[layer, EVEN.index(level)].item() for layer, level in enumerate(found))
        wanted = round(sum(found) * 10)
        every = (at for at in product(range(4), repeat=4) if round(sum(EVEN[i] for i in at) * 10) == wanted)
        assert lost == pytest.approx(min(sum(losses[layer, i].item() for layer, i in enumerate(at)) for at in every))


def test_the_mean_is_what_was_asked_for(tiny, tokens):
    model = tiny("llama", blocks=6)
    windows = tokens.view(-1, 16)
    for asked, found in zip([0.7, 0.9], shares(model, windows, [0.7, 0.9]), strict=True):
        assert asked <= sum(found) / 6 + 1e-9 < asked + 0.01 + 1e-9
        assert all(LEVELS[0] - 1e-9 <= share <= LEVELS[-1] + 1e-9 for share in found)

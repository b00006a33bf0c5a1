"""Shares of zeros by layer: their mean, and who gets the most."""

import pytest
import torch

from toolkit.errors import UserError
from toolkit.recovery.shares import LEVELS, STEPS, finer, shares


def test_finer_levels_keep_the_losses_and_grow_evenly():
    losses = torch.tensor([[1e-3, 1e-2, 1e-1, 1.0], [1, 2, 4, 8]], dtype=torch.float64)
    levels, found = finer(LEVELS, losses)
    assert levels[::STEPS] == pytest.approx(LEVELS)
    assert torch.allclose(found[:, ::STEPS], losses)
    assert levels[STEPS // 2] == pytest.approx(0.66)
    assert found[:, STEPS // 2].tolist() == pytest.approx([10**-2.5, 2**0.5])


def test_the_mean_is_what_was_asked_for(tiny, tokens):
    model = tiny("llama", blocks=6)
    windows = tokens.view(-1, 16)
    for asked, found in zip([0.7, 0.9], shares(model, windows, [0.7, 0.9]), strict=True):
        assert asked <= sum(found) / 6 + 1e-9 < asked + 0.01 + 1e-9
        assert all(LEVELS[0] - 1e-9 <= share <= LEVELS[-1] + 1e-9 for share in found)


@torch.no_grad()
def test_a_layer_that_matters_less_gets_more_zeros(tiny, tokens):
    model = tiny("llama")
    model.model.layers[1].mlp.down_proj.weight *= 0.05
    ((first, idle, last),) = shares(model, tokens.view(-1, 16), [0.8])
    assert idle > max(first, last)


def test_other_shares_are_refused(tiny, tokens):
    with pytest.raises(UserError, match=r"share of zeros 0.5: expected one from 0.6 to 0.96"):
        shares(tiny("llama"), tokens.view(-1, 16), [0.8, 0.5])

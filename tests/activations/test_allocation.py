"""Zeros shared out over layers, against every way there is."""

from itertools import product

import pytest
import torch

from toolkit.activations import share_out
from toolkit.errors import UserError

LEVELS = [0.5, 0.6, 0.7, 0.8]


def test_worked_example():
    """Steps up cost 1, 2, 3 and 10, 20, 30: the first layer takes all of its three, then the second one of its."""
    losses = torch.tensor([[0.0, 1, 3, 6], [0, 10, 30, 60]])
    assert share_out(losses, LEVELS, 0.65) == [0.8, 0.5]
    assert share_out(losses, LEVELS, 0.7) == [0.8, 0.6]
    assert share_out(losses, LEVELS, 0.66) == [0.8, 0.6]  # less than one step above
    assert share_out(losses, LEVELS, 0.5) == [0.5, 0.5]
    assert share_out(losses, LEVELS, 0.8) == [0.8, 0.8]


@pytest.mark.parametrize("seed", range(5))
def test_nothing_is_better_where_losses_rise_ever_faster(seed):
    generator = torch.Generator().manual_seed(seed)
    steps = torch.rand(4, 3, generator=generator).sort(dim=1).values
    losses = torch.cat([torch.zeros(4, 1), steps.cumsum(1)], dim=1).double()
    for zeros in (0.525, 0.6, 0.7, 0.75):
        found = share_out(losses, LEVELS, zeros)
        assert sum(found) / 4 >= zeros - 1e-9
        lost = sum(losses[layer, LEVELS.index(level)].item() for layer, level in enumerate(found))
        wanted = round(sum(found) * 10)
        every = (at for at in product(range(4), repeat=4) if round(sum(LEVELS[i] for i in at) * 10) == wanted)
        assert lost == pytest.approx(min(sum(losses[layer, i].item() for layer, i in enumerate(at)) for at in every))


@pytest.mark.parametrize(
    ("levels", "zeros", "told"),
    [
        ([0.5, 0.6, 0.8, 0.9], 0.6, "rise by equal steps"),
        ([0.5, 0.6, 0.7], 0.6, "expected 4 shares"),
        (LEVELS, 0.4, "share of zeros 0.4: expected one from 0.5 to 0.8"),
        (LEVELS, 0.81, "share of zeros 0.81"),
    ],
)
def test_bad_levels_are_refused(levels, zeros, told):
    with pytest.raises(UserError, match=told):
        share_out(torch.zeros(2, 4), levels, zeros)

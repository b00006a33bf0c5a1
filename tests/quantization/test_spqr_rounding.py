"""Rounding to SpQR's levels: hand-worked groups, and the outliers that are chosen."""

import pytest
import torch

from toolkit.errors import UserError
from toolkit.quantization.spqr import SpQR


def round_to_nearest(weight, outliers=0.01):
    return SpQR(outliers).round(weight)


def test_one_far_weight_is_the_outlier():
    levels = torch.randint(0, 8, (16, 16), generator=torch.Generator().manual_seed(0))
    levels[:, 0], levels[:, 1] = 0, 7
    weight = 0.25 * (levels - 3.0)
    weight[5, 9] = 40
    found = round_to_nearest(weight, 1 / 256)
    assert (found.rows.tolist(), found.columns.tolist()) == ([5], [9])
    assert torch.equal(found.decode(), weight), "the outlier keeps what its code misses"
    assert (round_to_nearest(weight, 0).decode() - weight).abs().mean() > 0.02


@pytest.mark.parametrize("shape", [(0, 0), (0, 8), (8, 0), (1, 1), (17, 40), (64, 200)])
def test_errors_are_less_than_a_level_and_fall_with_outliers(shape):
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 0.02
    errors = []
    for share in (0, 0.05, 1):
        found = round_to_nearest(weight, share)
        assert len(found.rows) == round(share * weight.numel())
        errors.append(float((found.decode() - weight).square().sum()))
    if weight.numel() > 1:
        assert errors[2] < errors[1] < errors[0] < 0.1 * float(weight.square().sum())
    assert errors[2] <= 1e-6 * float(weight.square().sum())


def test_weights_that_become_infinite_are_refused():
    """65,504 / 7 is 9,360 in fp16, and seven times that overflows."""
    with pytest.raises(UserError, match="a weight near fp16's largest becomes infinite"):
        round_to_nearest(torch.full((16, 16), 65_504.0))

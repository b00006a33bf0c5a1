"""The contract of all quantisers of matrices: exact grids, the columns that matter first, and refusals."""

from functools import partial

import pytest
import torch

from tests.quantization.conftest import gram_of, random
from toolkit.errors import UserError
from toolkit.quantization.gptq import GPTQ
from toolkit.quantization.rtn import RoundToNearest
from toolkit.quantization.spqr import SpQR

CALIBRATED = {"spqr": partial(SpQR, 0), "gptq": partial(GPTQ, 3, 16)}
EVERY = [make(reorder=reorder) for make in CALIBRATED.values() for reorder in (False, True)] + [RoundToNearest(3, 16)]


@pytest.mark.parametrize("quantise", EVERY, ids=str)
def test_a_weight_on_its_grid_is_kept_exactly(quantise):
    codes = torch.randint(0, 8, (32, 48), generator=torch.Generator().manual_seed(3))
    codes[:, ::16], codes[:, 1::16] = 0, 7  # each group reaches both ends of its grid
    steps = torch.tensor([1.0, 8.0]).repeat(16)[:, None] / 64  # both ends of SpQR's second grid, too
    weight = steps * (codes - 3)
    assert torch.equal(quantise(weight, torch.eye(48)).decode(), weight)


@pytest.mark.parametrize("make", CALIBRATED.values(), ids=CALIBRATED)
def test_activation_order_quantises_the_columns_that_matter_first(make):
    weight, inputs = random(0, 32, 64, dtype=torch.float32), random(1, 300, 64, dtype=torch.float32)
    inputs *= torch.linspace(0.1, 3, 64)
    gram = inputs.T @ inputs
    quantised = make(reorder=True)(weight, gram)
    order = quantised.permutation.long()
    assert sorted(order.tolist()) == list(range(64))
    assert gram.diagonal()[order].diff().max() <= 0
    by_hand = make(reorder=False)(weight[:, order], gram[order][:, order])
    assert torch.equal(quantised.decode()[:, order], by_hand.decode())


@pytest.mark.parametrize("quantise", EVERY, ids=str)
def test_columns_without_input_matrices_of_one_value_and_what_fp16_cannot_hold(quantise):
    weight, gram = random(0, 20, 32, dtype=torch.float32), gram_of(1, 32, torch.float32)
    for value in (0.0, 0.75, -3.0):
        constant = torch.full((20, 32), value)
        torch.testing.assert_close(quantise(constant, gram).decode(), constant, rtol=2e-3, atol=6e-8)
    gram[:, 5] = gram[5] = 0
    assert quantise(weight, gram).decode()[:, 5].abs().max() < weight.abs().max()
    for value in (float("nan"), float("inf"), 70000.0):
        weight[1, 2] = value
        with pytest.raises(UserError, match="not finite or too large for fp16"):
            quantise(weight, gram)

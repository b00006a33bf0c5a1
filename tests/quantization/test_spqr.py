"""SpQR's quantiser against hand-worked groups and a slow one that shrinks the inverse Hessian."""

from itertools import product

import numpy as np
import pytest
import torch

from tests import naive_spqr_quantiser as naive
from tests.quantization.conftest import gram_of, random
from toolkit.errors import UserError
from toolkit.kernels.spqr import quantise as kernel
from toolkit.kernels.spqr.shared import dequantise
from toolkit.quantization.spqr import SpQR


def second_order(statistics):
    """Codes, and the scale and zero point of these codes."""
    codes = np.zeros(len(statistics), np.uint8)
    step, zero = kernel.second_order(np.array(statistics, np.float32), codes)
    return codes.tolist(), step, zero


def gains_of(weight, diagonal):
    """`leave_one_out_gains` of a matrix by rows."""
    padded = torch.nn.functional.pad(weight.T, (0, -len(weight) % kernel.LANES)).contiguous()
    return kernel.leave_one_out_gains(padded, diagonal)[:, : len(weight)].T


def test_a_group_worked_by_hand():
    low, high = np.array([-1.0, 0.0, 0.0]), np.array([2.5, 7.0, 0.0])
    scale, zero = np.empty((2, 3))
    kernel.first_order(low, high, scale, zero)
    assert scale.tolist() == [0.5, 1.0, 1.0]  # a group of zeros has any scale
    assert zero.tolist() == [2.0, 0.0, 0.0]
    codes, step, offset = second_order([0.5, 1.0, 1.0, 4.0])
    assert (step, offset) == (0.5, -1.0)  # steps of 0.5 from 0.5
    assert codes == [0, 1, 1, 7]
    assert [dequantise(code, step, offset) for code in codes] == [0.5, 1.0, 1.0, 4.0]
    assert second_order([0.75] * 5) == ([1] * 5, 0.75, 0.0), "rows with one statistic share it"


def test_the_gain_of_an_outlier_by_hand():
    weight = torch.tensor([[7.0, 1.0, 2.0, 70.0]])  # without the last, every weight is on the grid of steps of 1
    gains = gains_of(weight, torch.ones(4))
    # with it steps are 10: 7 becomes 10, 1 becomes 0, 2 becomes 0
    assert gains[0].tolist() == [9.0, 1.0, 4.0, 14.0]
    assert gains_of(weight, torch.full((4,), 2.0))[0, 3].item() == 14 / 4


@pytest.mark.parametrize("columns", [1, 7, 16])
def test_gains_are_those_of_the_slow_oracle(columns):
    weight, diagonal = random(columns, 9, columns), random(1, columns).abs() + 0.1
    expected = [naive.gains(row, diagonal.tolist()) for row in weight.tolist()]
    torch.testing.assert_close(gains_of(weight, diagonal), torch.tensor(expected, dtype=torch.float64))


def test_the_best_pair_of_codes_is_the_first_of_the_least_error():
    weight, importance = random(0, 16, kernel.LANES), random(1, 16, kernel.LANES).abs()
    scales, zeros = random(2, 8, kernel.LANES) + 0.5, 4 * random(3, 8, kernel.LANES)
    scales[1, 0], scales[:, 1] = torch.inf, scales[0, 1]  # too large; all scales of a row alike
    codes = ((weight / scales[:, None, None]) + zeros[:, None]).round().clamp(0, 7)
    decoded = (codes - zeros[:, None]) * scales[:, None, None]
    errors = ((decoded - weight).square() * importance).sum(-2)
    errors[(scales < 0)[:, None].expand_as(errors) | errors.isnan()] = torch.inf
    pairs = np.empty(kernel.LANES, np.uint8)
    kernel.best_pairs(*(array.numpy() for array in (weight, importance, scales, zeros)), pairs)
    assert pairs.tolist() == errors.flatten(0, 1).argmin(0).tolist()


CASES = [  # shape, share of outliers, whether scales are searched, columns of a group
    *product([(1, 5), (21, 40), (40, 70)], [0, 0.05, 1], [False, True], [16]),
    *product([(21, 40), (40, 150)], [0.05], [True], [32, 64]),
]


@pytest.mark.parametrize(("shape", "share", "search", "group"), CASES)
def test_a_matrix_is_quantised_as_the_slow_oracle_does_it(shape, share, search, group):
    weight, gram = random(sum(shape), *shape) * 0.05, gram_of(7, shape[1])
    quantised = SpQR(share, damping=0.01, reorder=False, search=search, block_size=2 * group, group=group)(weight, gram)
    expected, outliers, codes = naive.quantise(weight.numpy(), gram.numpy(), share, 0.01, search, group)
    assert quantised.codes.weights.tolist() == codes.tolist()
    assert len(quantised.values) == outliers
    torch.testing.assert_close(quantised.decode().numpy().astype("float64"), expected, rtol=1e-6, atol=1e-9)
    first = torch.arange(quantised.codes.scales.shape[1]) // (group // 16) * (group // 16)
    for stored in (quantised.codes.scales, quantised.codes.zeros, quantised.codes.second_order):
        assert torch.equal(stored, stored[:, first]), "tiles of one group hold the same statistics"


def test_groups_that_are_no_whole_tiles_are_refused():
    with pytest.raises(UserError, match="expected a multiple of"):
        SpQR(group=24)


def test_damping_is_raised_where_it_is_not_enough(caplog):
    weight, gram = random(0, 4, 16, dtype=torch.float32), torch.ones(16, 16)
    gram.diagonal().sub_(0.05)  # its smallest eigenvalue is −0.05
    found = SpQR(damping=0.01)(weight, gram)
    assert "Hessian of 16 inputs is not positive definite with damping 0.01: damping 0.1 was taken" in caplog.text
    assert torch.equal(found.decode(), SpQR(damping=0.1)(weight, gram).decode())
    with pytest.raises(UserError, match="not positive definite with damping 10"):
        SpQR()(weight, -torch.eye(16))

"""Where zeros fall: hand-worked masks, and slow counts on random ones."""

import pytest
import torch

from tests import naive_statistics
from tests.notebook_code import functions_of

statistics = functions_of("beyond/where_zeros_fall")

# zeros are True: rows of 1, 4 and 2 zeros
MASK = torch.tensor([[1, 0, 0, 0], [1, 1, 1, 1], [0, 1, 1, 0]], dtype=torch.bool)
SHAPES = [(1, 1), (17, 33), (5, 130)]


def random_mask(shape, seed, sparsity=0.5):
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < sparsity


def test_by_hand():
    # blocks of 2 × 3: the last column and the last row make short ones
    expected = torch.tensor([[4 / 6, 1 / 2], [2 / 3, 0]])
    torch.testing.assert_close(statistics.zeros_by_block(MASK, (2, 3)), expected)
    assert statistics.ell_padding(MASK) == pytest.approx((3 * 3 - 5) / 5)
    assert statistics.lost_to_two_four(MASK) == 1 / 5  # the first row's third non-zero
    other = torch.tensor([[1, 1, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0]], dtype=torch.bool)
    assert statistics.jaccard(MASK, other) == 5 / 8
    assert statistics.share(other == MASK) == 9 / 12
    assert statistics.chance_jaccard(0.5, 0.5) == pytest.approx(1 / 3)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("sparsity", [0.0, 0.3, 1.0])
def test_against_slow_counts(shape, sparsity):
    mask, other = random_mask(shape, 0, sparsity), random_mask(shape, 1)
    for block in ((1, 1), (2, 3), *statistics.BLOCKS):
        expected = torch.tensor(naive_statistics.zeros_by_block(mask.tolist(), block))
        torch.testing.assert_close(statistics.zeros_by_block(mask, block), expected)
    assert statistics.ell_padding(mask) == pytest.approx(naive_statistics.ell_padding(mask.tolist()))
    assert statistics.lost_to_two_four(mask) == pytest.approx(naive_statistics.lost_to_two_four(mask.tolist()))
    agreement, jaccard = naive_statistics.overlap(mask.tolist(), other.tolist())
    assert statistics.share(mask == other) == pytest.approx(agreement)
    assert statistics.jaccard(mask, other) == pytest.approx(jaccard)

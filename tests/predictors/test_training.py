"""Training against what a linear guess can reach, and on bits that a low-rank rule has made."""

import math

import pytest
import torch

from toolkit.predictors import LowRank, Samples, quality
from toolkit.predictors.low_rank import balanced_loss, reduced_rank


@pytest.fixture
def learnable():
    """Two layers whose neurons fire by a rule of rank 3."""
    generator = torch.Generator().manual_seed(0)
    inputs, outputs = [], []
    for _ in range(2):
        x = torch.randn(2048, 24, generator=generator)
        rule = torch.randn(40, 3, generator=generator) @ torch.randn(3, 24, generator=generator)
        inputs.append(x)
        outputs.append((x @ rule.T - 4).relu())
    return Samples(tuple(inputs), tuple(outputs), (torch.ones(40),) * 2)


def test_a_rule_of_low_rank_is_learnt(learnable):
    table = quality(LowRank.train(learnable, 3, epochs=30, dtype=torch.float32), learnable)
    assert (table["recall"] > 0.95).all()
    assert (table["false_positives"] < 0.2).all()
    poor = quality(LowRank.train(learnable, 1, epochs=30, dtype=torch.float32), learnable)
    assert (poor["recall"] - poor["false_positives"] < table["recall"] - table["false_positives"]).all()


def test_training_repeats_itself_and_takes_ranks_by_layer(learnable):
    first, second = (LowRank.train(learnable, [2, 5], epochs=1, seed=3) for _ in range(2))
    assert [one.rank for one in first] == [2, 5]
    assert all(torch.equal(one.outward, other.outward) for one, other in zip(first, second, strict=True))


def test_the_start_is_the_best_linear_guess():
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(200, 6, generator=generator), torch.randn(200, 8, generator=generator)
    inward, outward = reduced_rank(x, y, 6)
    full = torch.linalg.lstsq(x, y).solution.T
    assert torch.allclose(outward @ inward, full, atol=5e-3)
    values, vectors = torch.linalg.eigh((x @ full.T).T @ (x @ full.T))  # guesses, then their main directions
    best = full.T @ vectors[:, -2:] @ vectors[:, -2:].T
    inward, outward = reduced_rank(x, y, 2)
    assert torch.allclose((outward @ inward).T, best, atol=5e-3)
    assert values[0] >= -1e-3


def test_the_loss_weighs_active_neurons_like_the_others():
    bits = torch.tensor([[1.0, 0.0, 0.0, 0.0]])
    unsure_of_active = torch.tensor([[0.0, -99.0, -99.0, -99.0]])
    unsure_of_others = torch.tensor([[99.0, 0.0, 0.0, 0.0]])
    losses = [balanced_loss(logits, bits, bits.mean()).item() for logits in (unsure_of_active, unsure_of_others)]
    assert losses == pytest.approx([0.75 * math.log(2)] * 2)

"""Each method on single layers, against slow oracles and examples worked by hand."""

import pytest
import torch

from tests import naive_pruning
from toolkit.errors import UserError
from toolkit.pattern import Pattern
from toolkit.sparsity import METHODS, hessian
from toolkit.sparsity.hessian import factorised
from toolkit.sparsity.sparsegpt import SparseGPT

SHAPES = [(1, 1), (5, 16), (7, 40)]
PATTERNS = ["2:4", "1:4", "7:8"]


def layer(rows, columns, tokens=64, seed=0):
    """A weight, and correlated inputs of uneven scale."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=generator)
    inputs = torch.randn(tokens, columns, generator=generator) @ torch.randn(columns, columns, generator=generator)
    return weight, inputs * torch.logspace(-1, 1, columns)


def test_every_method_has_its_oracle():
    assert naive_pruning.METHODS.keys() == METHODS.keys(), "register an oracle in METHODS of tests/naive_pruning.py"


@pytest.mark.parametrize("name", naive_pruning.METHODS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("sparsity", [0, 0.5, 0.77])
def test_unstructured_matches_oracle(name, shape, sparsity):
    weight, inputs = layer(*shape)
    pruned = METHODS[name](weight, inputs.T @ inputs, sparsity, None)
    expected = naive_pruning.METHODS[name](weight, inputs, sparsity)
    assert torch.equal(pruned == 0, expected == 0)
    torch.testing.assert_close(pruned, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", naive_pruning.METHODS)
@pytest.mark.parametrize("text", PATTERNS)
def test_patterns_match_oracle(name, text):
    weight, inputs = layer(6, 40)
    pattern = Pattern.parse(text)
    pruned = METHODS[name](weight, inputs.T @ inputs, pattern.sparsity, pattern)
    expected = naive_pruning.METHODS[name](weight, inputs, None, (pattern.kept, pattern.group))
    assert (pruned.view(6, -1, pattern.group) != 0).sum(-1).unique().tolist() == [pattern.kept]
    assert torch.equal(pruned == 0, expected == 0)
    torch.testing.assert_close(pruned, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("text", [None, "2:4", "2:3"])
@pytest.mark.parametrize("block_size", [1, 7, 16, 100])
def test_sparsegpt_blocks_match_the_plain_recursion(block_size, text):
    weight, inputs = layer(5, 36, seed=1)
    pattern = Pattern.parse(text) if text else None
    pruned = SparseGPT(block_size=block_size)(weight, inputs.T @ inputs, 0.5, pattern)
    groups = (pattern.kept, pattern.group) if pattern else None
    expected = naive_pruning.sparsegpt(weight, inputs, 0.5, groups, block=block_size)
    assert torch.equal(pruned == 0, expected == 0)
    torch.testing.assert_close(pruned, expected, rtol=1e-3, atol=1e-3)


def test_wanda_by_hand():
    weight = torch.tensor([[1.0, -4, 3, 2], [7, 1, -6, 5]])
    gram = torch.diag(torch.tensor([64.0, 1, 4, 9]))  # norms 8, 1, 2, 3: scores 8 4 6 6, 56 1 12 15
    assert METHODS["wanda"](weight, gram, 0.5, None).tolist() == [[1, 0, 0, 2], [7, 0, 0, 5]]
    assert METHODS["wanda"](weight, gram, 0.75, Pattern(1, 4)).tolist() == [[1, 0, 0, 0], [7, 0, 0, 0]]
    assert METHODS["wanda"](weight.flip(1), gram, 0.5, Pattern(1, 2)).tolist() == [[2, 0, -4, 0], [5, 0, 0, 7]]


def test_magnitude_by_hand():
    weight = torch.tensor([[1.0, -4, 3, 2], [7, 1, -6, 5]])
    assert METHODS["magnitude"](weight, None, 0.5, None).tolist() == [[0, -4, 0, 0], [7, 0, -6, 5]]
    assert METHODS["magnitude"](weight, None, 0.5, Pattern(2, 4)).tolist() == [[0, -4, 3, 0], [7, 0, -6, 0]]


def test_sparsegpt_by_hand():
    """H = [[2, 1], [1, 2]], so [H⁻¹]₀₀ = 2/3; once column 0 is done, the inverse of what is left is 1/2."""
    gram = torch.tensor([[2.0, 1], [1, 2]])
    method = SparseGPT(damping=0)
    first = method(torch.tensor([[1.0, 3]]), gram, 0.5, None)  # scores 1.5, 18: the survivor gains 1/2
    last = method(torch.tensor([[3.0, 1]]), gram, 0.5, None)  # scores 13.5, 2: nobody is left to make up for it
    torch.testing.assert_close(first, torch.tensor([[0, 3.5]]))
    torch.testing.assert_close(last, torch.tensor([[3.0, 0]]))


@pytest.mark.parametrize("sparsity", [0.25, 0.5, 0.9])
def test_ties_keep_the_exact_sparsity(sparsity):
    weight, gram = torch.ones(6, 20), torch.eye(20)
    assert (METHODS["wanda"](weight, gram, sparsity, None) == 0).sum(1).unique().tolist() == [int(20 * sparsity)]
    for name in METHODS:
        assert (METHODS[name](weight, gram, sparsity, None) == 0).sum() == int(120 * sparsity), name


@pytest.mark.parametrize("damping", [0, 0.01])
@pytest.mark.parametrize("text", [None, "2:4"])
def test_sparsegpt_clears_columns_that_no_input_reached(text, damping):
    weight, inputs = layer(4, 16)
    inputs[:, [3, 9]] = 0
    pattern = Pattern.parse(text) if text else None
    pruned = SparseGPT(damping)(weight, inputs.T @ inputs, 0.5, pattern)
    expected = naive_pruning.sparsegpt(weight, inputs, 0.5, (2, 4) if text else None, damping)
    assert (pruned[:, [3, 9]] == 0).all()
    assert torch.equal(pruned == 0, expected == 0)
    torch.testing.assert_close(pruned, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("tile", [512, 7])
def test_factor_is_the_published_one(monkeypatch, tile):
    monkeypatch.setattr(hessian, "TILE", tile)
    _, inputs = layer(1, 24, tokens=96)
    gram = (inputs.T @ inputs).double()
    damped = gram + 0.01 * gram.diagonal().mean() * torch.eye(24)
    published = torch.linalg.cholesky(torch.linalg.inv(damped), upper=True)
    found = factorised(gram, 0.01)
    torch.testing.assert_close(found.diagonal, published.diagonal())
    torch.testing.assert_close(torch.linalg.inv(found.upper), published)
    torch.testing.assert_close(found.inverse(slice(8, 16)), published[8:16, 8:16])
    ordered = factorised(gram, 0.01, reorder=True)
    torch.testing.assert_close(ordered.upper @ ordered.upper.T, damped[ordered.order][:, ordered.order])


def test_pattern_reads_and_writes():
    for text in ("4:2", "2:4:8", 24):
        with pytest.raises(UserError, match='expected "N:M"'):
            Pattern.parse(text)
    assert Pattern.parse("2:8") == Pattern(kept=2, group=8)
    assert str(Pattern(2, 8)) == "2:8"
    assert Pattern(2, 8).sparsity == 0.75

"""Zeros in the inputs of all decoder linears: the share that is skipped, and outputs by a plain product."""

import numpy as np
import pytest
import torch

from tests.papers.beyond.test_sparse_curve import toy
from toolkit.papers.beyond import input_zeros
from toolkit.papers.beyond.input_zeros import InputZeros, factors, linears, magnitudes
from toolkit.studies.quality import EvaluationSettings


@pytest.fixture
def model(monkeypatch):
    made = toy().requires_grad_(False)
    tokens = torch.randint(1, 60, (4096,), generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr(input_zeros, "loaded", lambda name: (made, None, ""))
    monkeypatch.setattr(input_zeros, "tokens_of", lambda *_: tokens)
    magnitudes.cache_clear()
    yield made, tokens
    magnitudes.cache_clear()


def test_the_smallest_inputs_of_every_linear_are_skipped(model):
    network, tokens = model
    share, seen = 0.7, []
    with InputZeros(share).change(EvaluationSettings("toy")) as facts, torch.no_grad():
        for linear in linears(network):
            linear.register_forward_hook(lambda module, args, output: seen.append((module, args[0], output)))
        network(tokens[None, :64])
    assert facts["skipped"] == pytest.approx(share, abs=0.1)
    assert len(seen) == len(linears(network))
    zeros = sum(module.weight.numel() * (x == 0).double().mean().item() for module, x, _ in seen)
    assert facts["skipped"] == pytest.approx(zeros / sum(module.weight.numel() for module, _, _ in seen))
    for module, x, output in seen:
        torch.testing.assert_close(output, x @ module.weight.T, rtol=1e-4, atol=1e-5)
    assert not any(module._forward_pre_hooks for module, _, _ in seen)


@pytest.mark.parametrize("shape", [(12, 8), (8, 12)])
def test_factors_are_the_nearest_of_their_rank(shape):
    """Against NumPy's singular values: what is lost is the length of those that are left out."""
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    up, down = factors(weight, 0.5)
    rank = int(0.5 * weight.numel() / sum(shape))
    assert up.shape == (shape[0], rank)
    assert down.shape == (rank, shape[1])
    values = np.linalg.svd(weight.double().numpy(), compute_uv=False)
    lost = torch.linalg.matrix_norm(weight - up @ down).item()
    assert lost == pytest.approx(np.sqrt((values[rank:] ** 2).sum()), rel=1e-4)


def test_a_low_rank_product_stands_for_the_small_inputs(model):
    """With factors of full rank nothing is lost, however many inputs are left out."""
    network, tokens = model
    with torch.no_grad():
        whole = network(tokens[None, :64]).logits
        with InputZeros(0.7, low_rank=2.0).change(EvaluationSettings("toy")) as facts:
            repaired = network(tokens[None, :64]).logits
        with InputZeros(0.7).change(EvaluationSettings("toy")):
            cut = network(tokens[None, :64]).logits
    assert facts["skipped"] == pytest.approx(0.7, abs=0.1)
    torch.testing.assert_close(repaired, whole, rtol=1e-3, atol=1e-4)
    assert (cut - whole).abs().max() > 10 * (repaired - whole).abs().max()

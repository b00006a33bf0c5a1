"""The FFN of bundled neurons against torch in double precision, by every backend."""

import numpy as np
import pytest
import torch

from tests.kernels.families import ORACLES, bundle, each_backend, ffn, random
from toolkit.errors import UserError
from toolkit.kernels import neurons

backend = each_backend(neurons)


def test_a_bias_of_each_neuron(backend):
    for dtype in (torch.float32, torch.float16):
        bundles, x, bias = bundle(33, 67, 2, dtype), random(3, 67), random(33, seed=1).to(dtype)
        expected, bound = ffn(bundles, x, "relu", bias)
        found = neurons.ffn(bundles, x, "relu", bias, backend=backend)
        assert ((found - expected).abs() <= 1e-5 * bound).all()


@pytest.mark.parametrize("activation", neurons.ACTIVATIONS)
def test_every_activation(activation):
    values = torch.cat([torch.linspace(-30, 30, 301), torch.tensor([-0.0, torch.nan])])
    found = torch.tensor([neurons.ACTIVATIONS[activation](value) for value in values.numpy()])
    expected = ORACLES[activation](values.double()).float()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6, equal_nan=True)


def test_worked_example(backend):
    """Two neurons, hidden 2. Neuron 0: relu(1·3 + 2·1 − 1) = 4; neuron 1: relu(−1·3) = 0."""
    bundles = torch.tensor([[1.0, 2, 10, 20], [-1, 0, 5, 5]])
    found = neurons.ffn(bundles, torch.tensor([3.0, 1]), "relu", torch.tensor([-1.0, 0]), backend=backend)
    assert found.tolist() == [40, 80]
    gated = torch.tensor([[1.0, 0, 0, 2, 3, 4], [2, 0, 0, 1, 1, 1]])  # silu(100) · 2 = 200; silu(200) · 1 = 200
    x = torch.tensor([100.0, 1])
    assert neurons.ffn(gated, x, "silu", backend=backend).tolist() == [800, 1000]
    gated[1, 0] = 1  # silu(100) · 1 = 100
    assert neurons.ffn(gated, x, "silu", threshold=100, backend=backend).tolist() == [600, 800]


def test_neurons_within_the_threshold_count_as_zero(backend):
    bundles, x = bundle(300, 96, 3), torch.randn(2, 96, generator=torch.Generator().manual_seed(0))
    for threshold in (0.05, 0.5):
        found = neurons.ffn(bundles, x, "silu", threshold=threshold, backend=backend)
        expected, bound = ffn(bundles, x, "silu", threshold=threshold)
        assert ((found - expected).abs() <= 1e-5 * bound).all()
    assert not neurons.ffn(bundles, x, "silu", threshold=1e9, backend=backend).any()


def test_a_nan_shows(backend):
    bundles = bundle(4, 8, 2)
    bundles[2, 3] = torch.nan
    assert neurons.ffn(bundles, torch.ones(8), "relu", threshold=1e9, backend=backend).isnan().all()


def test_rows_are_added_in_the_order_that_is_asked_for(backend):
    """Wherever they lie, whatever lies between them, in one call or in several: no bit changes."""
    whole, x = bundle(300, 200, 3, torch.bfloat16), torch.randn(3, 200, generator=torch.Generator().manual_seed(1))
    edges = neurons.even_edges(300, 4)
    generator = np.random.default_rng(0)

    def total(*calls):
        partials, sums = np.zeros((4, 3, 200), np.float32), np.empty((3, 200), np.float32)
        for ids in calls:
            places = generator.permutation(400)[: len(ids)]  # a store with rows that nobody asks for
            store = torch.full((400, 600), torch.nan, dtype=torch.bfloat16)
            store[torch.from_numpy(places)] = whole[torch.from_numpy(ids)]
            order = places, np.searchsorted(ids, edges)
            neurons.add(store, x, "silu", None, 0.01, order, partials, backend=backend)
        neurons.add_up(partials, sums)
        return torch.from_numpy(sums)

    ids = np.sort(generator.permutation(300)[:217])
    found = total(ids)
    expected, bound = ffn(whole[torch.from_numpy(ids)], x, "silu", threshold=0.01)
    assert ((found - expected).abs() <= 1e-4 * bound).all()
    assert all(torch.equal(total(*np.split(ids, cuts)), found) for cuts in ([], [100], [1, 30, 31, 200]))


@pytest.mark.parametrize("order", [([0, 5], [0, 2]), ([0, -1], [0, 2]), ([0, 1], [0, 1]), ([0, 1], [0, 1, 2])])
def test_an_order_that_does_not_fit_is_refused(order):
    rows, edges = map(np.array, order)
    given = bundle(5, 8, 2), torch.ones(1, 8), "relu", None, 0.0, (rows, edges), np.zeros((1, 1, 8), np.float32)
    with pytest.raises(ValueError, match="an order of 2 rows"):
        neurons.add(*given)


def test_rows_of_a_larger_matrix_into_a_given_result(backend):
    matrix, x = bundle(20, 70, 2), torch.randn(70)
    out = torch.full((70,), torch.nan)
    assert neurons.ffn(matrix[:5], x, "relu", out=out, backend=backend) is out
    assert torch.equal(out, neurons.ffn(matrix[:5].clone(), x, "relu", backend=backend))
    shared = x.clone()
    assert torch.equal(neurons.ffn(matrix[:5], shared, "relu", out=shared, backend=backend), out)


@pytest.mark.parametrize(
    ("change", "error", "told"),
    [
        ({"activation": "swish"}, UserError, "unknown activation 'swish'"),
        ({"backend": "cude"}, UserError, "unknown backend 'cude'; choose from: auto, avx2, cuda, portable"),
        ({"backend": "cuda"}, UserError, "backend 'cuda' (needs|works)"),
        ({"bundles": torch.ones(4, 25)}, ValueError, "expected torch.float32 \\[4, 24\\]"),
        ({"bundles": torch.ones(4, 64)}, ValueError, "expected fp32, fp16 or bf16, \\[rows, 24\\]"),
        ({"bundles": torch.ones(4, 16).double()}, ValueError, "expected fp32, fp16 or bf16"),
        ({"bundles": torch.ones(16, 4).T}, ValueError, "must be contiguous"),
        ({"bias": torch.ones(3)}, ValueError, "bias is torch.float32 \\[3\\]; expected torch.float32 \\[4\\]"),
        ({"threshold": -1.0}, ValueError, "threshold is -1.0; expected 0 or more"),
        ({"threshold": float("nan")}, ValueError, "threshold is nan"),
        ({"out": torch.ones(8).double()}, ValueError, "out is torch.float64"),
        ({"x": torch.ones(8, requires_grad=True)}, ValueError, "requires a gradient"),
    ],
)
def test_wrong_arguments_are_refused(change, error, told):
    given = {"bundles": torch.ones(4, 16), "x": torch.ones(8), "activation": "relu"} | change
    with pytest.raises(error, match=told):
        neurons.ffn(**given)

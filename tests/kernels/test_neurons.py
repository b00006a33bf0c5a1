"""The FFN of bundled neurons against torch in double precision, by every backend."""

import pytest
import torch

from tests.kernels.families import ORACLES, bundle, each_backend, ffn, random
from toolkit.errors import UserError
from toolkit.kernels import neurons

backend = each_backend(neurons)


def test_a_bias_of_each_neuron(backend):
    bundles, x, bias = bundle(33, 67, 2, torch.float16), random(3, 67), random(33, seed=1).half()
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
    bundles = torch.tensor([[1.0, 2, 10, 20], [-1, 0, 5, 5]]).half()
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
    bundles = bundle(4, 8, 2, torch.float16)
    bundles[2, 3] = torch.nan
    assert neurons.ffn(bundles, torch.ones(8), "relu", threshold=1e9, backend=backend).isnan().all()


def test_rows_of_a_larger_matrix(backend):
    matrix, x = bundle(20, 70, 2, torch.float16), torch.randn(70)
    alone = neurons.ffn(matrix[:5].clone(), x, "relu", backend=backend)
    assert torch.equal(neurons.ffn(matrix[:5], x, "relu", backend=backend), alone)


def test_wrong_arguments_are_refused():
    sound = {"bundles": torch.ones(4, 16), "x": torch.ones(8), "activation": "relu"}
    for name, wrong, told in (
        ("activation", "swish", "unknown activation 'swish'"),
        ("bundles", torch.ones(4, 25), "expected torch.float32"),
        ("bundles", torch.ones(4, 64), "bundles are"),
        ("bundles", torch.ones(4, 16).double(), "bundles are"),
        ("bundles", torch.ones(16, 4).T, "must be contiguous"),
        ("bias", torch.ones(3), "bias is"),
        ("threshold", -1.0, "threshold is -1.0"),
        ("threshold", float("nan"), "threshold is nan"),
    ):
        with pytest.raises((UserError, ValueError), match=told):
            neurons.ffn(**sound | {name: wrong})

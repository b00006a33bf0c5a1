"""The CUDA kernels of bundled neurons against the oracle. `test_cuda.py` runs this file: in the simulator,
which takes tensors on the CPU, and on a GPU where there is one, with larger matrices added."""

import pytest
import torch

from tests.kernels.families import DEVICE, bundle, ffn
from toolkit.kernels import neurons
from toolkit.kernels.neurons import cuda as kernels


def found(bundles, x, activation, bias=None, threshold=0.0):
    bias = None if bias is None else bias.to(DEVICE)
    return neurons.ffn(bundles.to(DEVICE), x.to(DEVICE), activation, bias, threshold, backend="cuda").cpu()


def is_close(sums, bundles, x, activation, bias=None, threshold=0.0):
    expected, bound = ffn(bundles, x, activation, bias, threshold)
    return sums.dtype == torch.float32 and bool(((sums - expected).abs() <= 1e-5 * bound).all())


def test_a_bias_of_each_neuron():
    bundles, x, bias = bundle(9, 36, 2, torch.float16), torch.ones(1, 36), torch.linspace(-1, 1, 9).half()
    assert is_close(found(bundles, x, "relu", bias), bundles, x, "relu", bias)


@pytest.mark.parametrize("activation", sorted(set(neurons.ACTIVATIONS) - {"relu", "silu"}))
def test_every_activation(activation):
    bundles, x = bundle(3, 4, 2, seed=4), torch.randn(1, 4, generator=torch.Generator().manual_seed(4))
    assert is_close(found(bundles, x, activation), bundles, x, activation)


def test_neurons_within_the_threshold_count_as_zero():
    bundles, x = bundle(7, 8, 3), torch.randn(2, 8, generator=torch.Generator().manual_seed(0))
    assert is_close(found(bundles, x, "silu", threshold=0.3), bundles, x, "silu", threshold=0.3)
    bundles[:, -8:] = torch.nan  # of columns that are not read
    assert not found(bundles, x, "silu", threshold=1e9).any()
    bundles[2, 3] = torch.nan
    assert found(bundles, x, "silu", threshold=1e9).isnan().all()


@pytest.mark.parametrize("multiprocessors", [0, 10_000])
def test_any_number_of_parts(multiprocessors, monkeypatch):
    monkeypatch.setattr(kernels, "multiprocessors", lambda device: multiprocessors)
    bundles, x = bundle(33, 4, 2), torch.randn(1, 4, generator=torch.Generator().manual_seed(0))
    assert is_close(found(bundles, x, "relu"), bundles, x, "relu")


def test_more_vectors_than_one_pass_takes_and_one_alone(monkeypatch):
    monkeypatch.setattr(kernels, "VECTORS", 2)
    bundles, x = bundle(5, 8, 3, torch.float16), torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
    sums = found(bundles, x, "silu")
    assert is_close(sums, bundles, x, "silu")
    assert torch.equal(found(bundles, x[2], "silu"), sums[2])


def test_rows_that_begin_at_any_address():
    bundles, x = bundle(5, 8, 2, torch.float16), torch.randn(8, generator=torch.Generator().manual_seed(0))
    room = torch.cat([torch.zeros(1, dtype=torch.float16), bundles.flatten()]).to(DEVICE)
    moved = room[1:].view(bundles.shape)
    assert kernels.elements_at_once(moved, 8) == 1
    assert kernels.elements_at_once(bundles, 8) == 4
    assert is_close(found(moved, x, "relu"), bundles, x, "relu")

"""The CUDA kernels of bundled neurons against the oracle. `test_cuda.py` runs this file: in the simulator,
which takes tensors on the CPU, and on a GPU where there is one, with larger matrices added."""

import os

import pytest
import torch

from tests.kernels.test_neurons import CASES, bundle, naive
from toolkit.kernels import neurons
from toolkit.kernels.neurons import cuda as kernels

SIMULATED = os.environ.get("NUMBA_ENABLE_CUDASIM") == "1"
DEVICE = "cpu" if SIMULATED else "cuda"
SHAPES = [(0, 5), (1, 1), (9, 36)] + ([] if SIMULATED else [(33, 199), (3000, 4096)])  # rows, hidden


def found(bundles, x, activation, bias=None, threshold=0.0):
    bias = None if bias is None else bias.to(DEVICE)
    return neurons.ffn(bundles.to(DEVICE), x.to(DEVICE), activation, bias, threshold, backend="cuda").cpu()


def is_close(sums, bundles, x, activation, bias=None, threshold=0.0):
    expected, bound = naive(bundles, x, activation, bias, threshold)
    return sums.dtype == torch.float32 and bool(((sums - expected).abs() <= 1e-5 * bound).all())


@pytest.mark.parametrize(("dtype", "activation", "parts"), CASES)
@pytest.mark.parametrize("batch", [1, 3])
def test_sums_are_the_oracle_s(dtype, activation, parts, batch):
    for seed, (rows, hidden) in enumerate(SHAPES):
        bundles, generator = bundle(rows, hidden, parts, dtype, seed), torch.Generator().manual_seed(seed)
        x = torch.randn(batch, hidden, generator=generator)
        bias = torch.randn(rows, generator=generator).to(dtype) if parts == 2 and seed % 2 else None
        assert is_close(found(bundles, x, activation, bias), bundles, x, activation, bias), (rows, hidden)


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

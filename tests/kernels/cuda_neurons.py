"""The CUDA kernels of bundled and of quantised neurons against the oracle. `test_cuda.py` runs this file: in the
simulator, which takes tensors on the CPU, and on a GPU where there is one, with larger matrices added."""

import pytest
import torch

from tests.kernels.families import DEVICE, bundle, ffn, ffn_of_records, random, records_of
from toolkit.kernels import neurons
from toolkit.kernels.neurons import cuda as kernels
from toolkit.kernels.neurons.records import section_bytes


def found(bundles, x, activation, bias=None, threshold=0.0, bits=None):
    bias = None if bias is None else bias.to(DEVICE)
    given = bundles.to(DEVICE), x.to(DEVICE), activation, bias, threshold
    return neurons.ffn(*given, backend="cuda", bits=bits).cpu()


def is_close(sums, bundles, x, activation, bias=None, threshold=0.0, bits=None):
    if bits:
        (expected, bound), tolerance = ffn_of_records(bundles, x, bits, threshold), 2e-5
    else:
        (expected, bound), tolerance = ffn(bundles, x, activation, bias, threshold), 1e-5
    return sums.dtype == torch.float32 and bool(((sums - expected).abs() <= tolerance * bound).all())


def test_a_bias_of_each_neuron():
    bundles, x, bias = bundle(9, 36, 2, torch.float16), torch.ones(1, 36), torch.linspace(-1, 1, 9).half()
    assert is_close(found(bundles, x, "relu", bias), bundles, x, "relu", bias)


@pytest.mark.parametrize("activation", sorted(set(neurons.ACTIVATIONS) - {"relu", "silu"}))
def test_every_activation(activation):
    bundles, x = bundle(3, 4, 2, seed=4), random(1, 4, seed=4)
    assert is_close(found(bundles, x, activation), bundles, x, activation)


def test_neurons_within_the_threshold_count_as_zero():
    bundles, x = bundle(7, 8, 3), random(2, 8)
    assert is_close(found(bundles, x, "silu", threshold=0.3), bundles, x, "silu", threshold=0.3)
    bundles[:, -8:] = torch.nan  # of columns that are not read
    assert not found(bundles, x, "silu", threshold=1e9).any()
    bundles[2, 3] = torch.nan
    assert found(bundles, x, "silu", threshold=1e9).isnan().all()


@pytest.mark.parametrize("bits", [4, 2])
def test_quantised_neurons_within_the_threshold_count_as_zero(bits):
    records, x = records_of(5, 64, bits), random(2, 64)
    assert is_close(found(records, x, "silu", threshold=0.05, bits=bits), records, x, "silu", threshold=0.05, bits=bits)
    nbytes = section_bytes(64, bits)
    records[:, 2 * nbytes : 2 * nbytes + 8] = 0xFF  # NaN in down columns, which are not read
    assert not found(records, x, "silu", threshold=1e9, bits=bits).any()
    assert found(records, x, "silu", bits=bits).isnan().all()


@pytest.mark.parametrize("multiprocessors", [0, 10_000])
def test_any_number_of_parts(multiprocessors, monkeypatch):
    monkeypatch.setattr(kernels, "multiprocessors", lambda device: multiprocessors)
    bundles, x = bundle(33, 4, 2), random(1, 4)
    assert is_close(found(bundles, x, "relu"), bundles, x, "relu")


@pytest.mark.parametrize("bits", [None, 4])
def test_more_vectors_than_one_pass_takes_and_one_alone(bits, monkeypatch):
    monkeypatch.setattr(kernels, "VECTORS_OF_RECORDS" if bits else "VECTORS", 2)
    hidden = 64 if bits else 8
    bundles = records_of(3, hidden, bits) if bits else bundle(5, hidden, 3, torch.float16)
    x = random(3, hidden)
    sums = found(bundles, x, "silu", bits=bits)
    assert is_close(sums, bundles, x, "silu", bits=bits)
    assert torch.equal(found(bundles, x[2], "silu", bits=bits), sums[2])


def test_rows_that_begin_at_any_address():
    bundles, x = bundle(5, 8, 2, torch.float16), random(8)
    room = torch.cat([torch.zeros(1, dtype=torch.float16), bundles.flatten()]).to(DEVICE)
    moved = room[1:].view(bundles.shape)
    assert kernels.elements_at_once(moved, 8) == 1
    assert kernels.elements_at_once(bundles, 8) == 4
    assert is_close(found(moved, x, "relu"), bundles, x, "relu")

"""The CUDA kernels of quantised neurons against the oracle. `test_cuda.py` runs this file: in the
simulator, which takes tensors on the CPU, and on a GPU where there is one, with larger matrices added."""

import os

import pytest
import torch

from tests.kernels.test_neuron_records import oracle, records_of, vectors
from toolkit.kernels import neurons
from toolkit.kernels.neurons import cuda_records as kernels
from toolkit.kernels.neurons.records import section_bytes

SIMULATED = os.environ.get("NUMBA_ENABLE_CUDASIM") == "1"
DEVICE = "cpu" if SIMULATED else "cuda"
SHAPES = [(0, 64), (1, 64), (5, 128)] + ([] if SIMULATED else [(33, 576), (1408, 2048)])  # rows, hidden


def found(records, x, bits, threshold=0.0):
    given = records.to(DEVICE), x.to(DEVICE), "silu"
    return neurons.ffn(*given, threshold=threshold, bits=bits, backend="cuda").cpu()


def is_close(sums, records, x, bits, threshold=0.0):
    expected, bound = oracle(records, x, bits, threshold=threshold)
    return sums.dtype == torch.float32 and bool(((sums - expected).abs() <= 2e-5 * bound).all())


@pytest.mark.parametrize("bits", [4, 2])
@pytest.mark.parametrize("batch", [1, 3])
def test_sums_are_the_oracle_s(bits, batch):
    for seed, (rows, hidden) in enumerate(SHAPES):
        records, x = records_of(rows, hidden, bits, seed), vectors(batch, hidden)
        assert is_close(found(records, x, bits), records, x, bits), (rows, hidden)


@pytest.mark.parametrize("bits", [4, 2])
def test_neurons_within_the_threshold_count_as_zero(bits):
    records, x = records_of(5, 64, bits), vectors(2, 64)
    assert is_close(found(records, x, bits, 0.05), records, x, bits, 0.05)
    nbytes = section_bytes(64, bits)
    records[:, 2 * nbytes : 2 * nbytes + 8] = 0xFF  # NaN in down columns, which are not read
    assert not found(records, x, bits, 1e9).any()
    assert found(records, x, bits).isnan().all()


def test_more_vectors_than_one_pass_takes(monkeypatch):
    monkeypatch.setattr(kernels, "VECTORS", 2)
    records, x = records_of(3, 64, 4), vectors(3, 64)
    sums = found(records, x, 4)
    assert is_close(sums, records, x, 4)
    assert torch.equal(found(records, x[2], 4), sums[2])

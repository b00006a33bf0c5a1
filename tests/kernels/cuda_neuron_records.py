"""The CUDA kernels of quantised neurons against the oracle. `test_cuda.py` runs this file: in the
simulator, which takes tensors on the CPU, and on a GPU where there is one, with larger matrices added."""

import pytest
import torch

from tests.kernels.families import DEVICE, ffn_of_records, random, records_of
from toolkit.kernels import neurons
from toolkit.kernels.neurons import cuda as kernels
from toolkit.kernels.neurons.records import section_bytes


def found(records, x, bits, threshold=0.0):
    given = records.to(DEVICE), x.to(DEVICE), "silu"
    return neurons.ffn(*given, threshold=threshold, bits=bits, backend="cuda").cpu()


def is_close(sums, records, x, bits, threshold=0.0):
    expected, bound = ffn_of_records(records, x, bits, threshold=threshold)
    return sums.dtype == torch.float32 and bool(((sums - expected).abs() <= 2e-5 * bound).all())


@pytest.mark.parametrize("bits", [4, 2])
def test_neurons_within_the_threshold_count_as_zero(bits):
    records, x = records_of(5, 64, bits), random(2, 64)
    assert is_close(found(records, x, bits, 0.05), records, x, bits, 0.05)
    nbytes = section_bytes(64, bits)
    records[:, 2 * nbytes : 2 * nbytes + 8] = 0xFF  # NaN in down columns, which are not read
    assert not found(records, x, bits, 1e9).any()
    assert found(records, x, bits).isnan().all()


def test_more_vectors_than_one_pass_takes(monkeypatch):
    monkeypatch.setattr(kernels, "VECTORS_OF_RECORDS", 2)
    records, x = records_of(3, 64, 4), random(3, 64)
    sums = found(records, x, 4)
    assert is_close(sums, records, x, 4)
    assert torch.equal(found(records, x[2], 4), sums[2])

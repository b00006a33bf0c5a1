"""The FFN of quantised neurons against their decoded weights in double precision, by every backend."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.families import ffn_of_records, random, records_of
from toolkit.errors import UserError
from toolkit.kernels import neurons
from toolkit.kernels.neurons.records import section_bytes
from toolkit.quantization.neuron_records import record_bytes


@pytest.fixture(params=neurons.RECORD_BACKENDS)
def backend(request):
    if request.param not in neurons.available(4):
        pytest.skip(f"this CPU lacks what {request.param} needs")
    return request.param


@settings(max_examples=15, deadline=None)
@given(
    rows=st.integers(1, 30),
    blocks=st.integers(1, 12),
    bits=st.sampled_from([4, 2]),
    batch=st.integers(1, 8),
    threshold=st.sampled_from([0.0, 0.02, 0.3, 3.0]),
    seed=st.integers(0, 2**16),
)
def test_any_shape_and_threshold(rows, blocks, bits, batch, threshold, seed):
    records, x = records_of(rows, 64 * blocks, bits, seed), random(batch, 64 * blocks, seed=seed)
    expected, bound = ffn_of_records(records, x, bits, threshold=threshold)
    for backend in neurons.available(bits):
        found = neurons.ffn(records, x, "silu", threshold=threshold, bits=bits, backend=backend)
        assert ((found - expected).abs() <= 2e-5 * bound).all(), backend


@pytest.mark.parametrize("bits", [4, 2])
def test_a_neuron_by_hand(backend, bits):
    """All scales 1, all zero points 1; gate and up hold the code 2 in weight 0, down code 3 in weight 17: 1 and 2."""
    record, nbytes = torch.zeros(1, record_bytes(64, bits), dtype=torch.uint8), section_bytes(64, bits)
    codes = nbytes - 8 * bits
    for part, (weight, code) in enumerate([(0, 2), (0, 2), (17, 3)]):
        section = record[0, part * nbytes : (part + 1) * nbytes]
        section[:8] = torch.tensor([0.0, 1, 0, 1], dtype=torch.float16).view(torch.uint8)
        numbers = np.full(16, sum(1 << bits * field for field in range(4)))  # code 1: weight 0
        numbers[weight % 16] += (code - 1) << bits * (weight // 16)
        section[codes:] = torch.from_numpy(numbers.astype("<u2" if bits == 4 else "u1").view(np.uint8))
    x = torch.zeros(64)
    x[0] = 100  # silu(100) · 100
    expected = torch.zeros(64)
    expected[17] = 20_000
    torch.testing.assert_close(neurons.ffn(record, x, "silu", bits=bits, backend=backend), expected, rtol=1e-4, atol=0)


@pytest.mark.parametrize("bits", [4, 2])
def test_a_vector_that_is_not_finite_shows_and_leaves_the_others_alone(backend, bits):
    records, x = records_of(9, 128, bits), random(5, 128)
    alone = neurons.ffn(records, x, "silu", bits=bits, backend=backend)
    for value in (torch.nan, torch.inf, -torch.inf):
        x[2, 77] = value
        found = neurons.ffn(records, x, "silu", bits=bits, backend=backend)
        assert not found[2].isfinite().all()
        assert torch.equal(found[[0, 1, 3, 4]], alone[[0, 1, 3, 4]])


@pytest.mark.parametrize("bits", [4, 2])
def test_down_columns_of_inactive_neurons_are_not_read(backend, bits):
    records, x = records_of(9, 128, bits), random(2, 128)
    nbytes = section_bytes(128, bits)
    records[:, 2 * nbytes : 2 * nbytes + 8] = 0xFF  # NaN
    assert not neurons.ffn(records, x, "silu", threshold=1e9, bits=bits, backend=backend).any()
    assert neurons.ffn(records, x, "silu", bits=bits, backend=backend).isnan().all()


def test_wrong_arguments_are_refused():
    sound = {"bundles": torch.zeros(4, 192, dtype=torch.uint8), "x": torch.ones(64), "activation": "silu", "bits": 4}
    for name, wrong, told in (
        ("bits", 3, "bits of a neuron's codes 3"),
        ("bits", 2, r"expected torch.uint8 \[4, 128\]"),
        ("bits", None, "expected fp32, fp16 or bf16"),
        ("x", torch.ones(96), "hidden is 96"),
        ("x", torch.ones(128), r"expected torch.uint8 \[4, 256\]"),
        ("bundles", torch.zeros(4, 192), r"expected torch.uint8 \[4, 192\]"),
        ("bias", torch.zeros(4), "no bias"),
    ):
        with pytest.raises((UserError, ValueError), match=told):
            neurons.ffn(**sound | {name: wrong})

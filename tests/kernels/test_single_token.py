"""A single token's norms, gates, rotations and keys against plain formulas in float64."""

import numba
import numpy as np
import pytest
import torch

from tests.kernels.families import random
from toolkit.kernels.engine.exponential import exp
from toolkit.kernels.engine.tensors import FLOAT_BITS
from toolkit.kernels.single_token import (
    CLAMPED,
    add_and_normalise,
    add_to,
    append,
    gate,
    normalise,
    part_pairs,
    rotate,
)
from toolkit.models.activation import ACTIVATIONS

exponential = numba.njit(lambda x: exp(x))
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def close(found, expected, tolerance=1e-5):
    torch.testing.assert_close(
        torch.as_tensor(found).double(), torch.as_tensor(expected), rtol=tolerance, atol=tolerance
    )


@pytest.mark.parametrize("rows", [1, 5])
def test_norms_of_rows(rows):
    x, weight = random(rows, 70), random(70, seed=1)
    expected = x.double() / (x.double().pow(2).mean(1, keepdim=True) + 0.25).sqrt() * weight.double()
    out = np.empty((rows, 70), np.float32)
    normalise(x.numpy(), weight.numpy(), 0.25, out)
    close(out, expected)
    normalise(x.numpy(), weight.numpy(), 0.25, x.numpy())
    close(x, expected)


@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh"])
def test_gates_by_parts_of_the_vector(activation):
    x, up = 30 * random(70), random(70, seed=1)
    expected, step = ACTIVATIONS[activation](x.double()) * up.double(), gate(activation)
    step(x.numpy(), up.numpy(), 0, 33)
    close(x[:33], expected[:33])
    step(x.numpy(), up.numpy(), 33, 70)
    close(x, expected)
    far = torch.tensor([-200.0, 200.0])  # the exponential overflows, the product does not
    step(far.numpy(), torch.ones(2).numpy(), 0, 2)
    assert far.tolist() == [0.0, 200.0]


def test_the_gate_of_gpt_oss():
    """As transformers' `GptOssExperts` has it; both its vectors are clamped."""
    x, up = 9 * random(70), 9 * random(70, seed=1)
    given, factor = x.double().clamp(max=7), up.double().clamp(-7, 7)
    gate(CLAMPED)(x.numpy(), up.numpy(), 0, 70)
    close(x, (factor + 1) * given * (1.702 * given).sigmoid())


def test_the_norm_of_a_sum_keeps_the_sum():
    x, more, weight = random(1, 33), random(1, 33, seed=1), random(33, seed=2)
    total = (x + more).double()
    out = np.empty((1, 33), np.float32)
    add_and_normalise(x.numpy(), more.numpy(), weight.numpy(), 1e-6, out)
    close(x, total)
    close(out, total / (total.pow(2).mean() + 1e-6).sqrt() * weight.double())


def test_a_bias_is_added_to_each_vector():
    x = np.array([[1, 2], [3, 4]], np.float32)
    add_to(x, np.array([10, 20], np.float32))
    assert x.tolist() == [[11, 22], [13, 24]]


def test_a_rotation_by_hand():
    """Element 0 turns with element 2, element 1 with element 3: a quarter turn, and none. The second vector rests."""
    x = np.array([[[1, 2, 3, 4], [5, 6, 7, 8]], [[1, 2, 3, 4], [5, 6, 7, 8]]], np.float32)
    rotate(x, np.array([[0, 1, 0, 1], [1] * 4], np.float32), np.array([[1, 0, 1, 0], [0] * 4], np.float32))
    assert x.tolist() == [[[-3, 2, 1, 4], [-7, 6, 5, 8]], [[1, 2, 3, 4], [5, 6, 7, 8]]]


def test_pairs_side_by_side_become_halves():
    x = np.arange(12, dtype=np.float32).reshape(1, 2, 6)
    part_pairs(x)
    assert x.tolist() == [[[0, 2, 4, 1, 3, 5], [6, 8, 10, 7, 9, 11]]]


@pytest.mark.parametrize("dtype", DTYPES)
def test_keys_and_values_are_written_behind_those_that_are_there(dtype):
    pair, cache = random(2, 3, 4, 5), torch.zeros(2, 4, 9, 5, dtype=dtype)
    bits = cache.view(FLOAT_BITS[dtype]).numpy()
    append(dtype)(*pair.numpy(), np.array([0, 3]), *bits)
    assert torch.equal(cache[:, :, 2:5], pair.transpose(1, 2).to(dtype))
    assert int(cache[:, :, :2].count_nonzero() + cache[:, :, 5:].count_nonzero()) == 0


def test_exponentials():
    x = torch.linspace(-87, 88, 3001).numpy()
    found = np.array([exponential(value) for value in x])
    np.testing.assert_allclose(found, np.exp(x.astype(np.float64)), rtol=3e-7)
    ends = [exponential(np.float32(value)) for value in (-np.inf, -1e30, 0, 200, np.inf)]
    np.testing.assert_allclose(ends, [1.6e-38, 1.6e-38, 1, np.inf, np.inf], rtol=0.05)
    assert np.isnan(exponential(np.float32(np.nan)))

"""A single token's norms, rotations and attention against plain formulas in float64."""

import numpy as np
import pytest
import torch

from toolkit.kernels.engine import parallel
from toolkit.kernels.single_token import add_and_normalise, attend, bits, gate, normalise, rotate
from toolkit.models.activation import ACTIVATIONS

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


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


def test_the_norm_of_a_sum_keeps_the_sum():
    x, more, weight = random(1, 33), random(1, 33, seed=1), random(33, seed=2)
    total = (x + more).double()
    out = np.empty((1, 33), np.float32)
    add_and_normalise(x.numpy(), more.numpy(), weight.numpy(), 1e-6, out)
    close(x, total)
    close(out, total / (total.pow(2).mean() + 1e-6).sqrt() * weight.double())


def test_a_rotation_by_hand():
    """Element 0 turns with element 2, element 1 with element 3: a quarter turn, and none."""
    x = np.array([[1, 2, 3, 4], [5, 6, 7, 8]], np.float32)
    rotate(x, np.array([0, 1, 0, 1], np.float32), np.array([1, 0, 1, 0], np.float32))
    assert x.tolist() == [[-3, 2, 1, 4], [-7, 6, 5, 8]]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shared", [False, True])
def test_attention(dtype, shared, monkeypatch):
    if shared:  # by several threads, however short
        monkeypatch.setattr(parallel, "ROWS_WORTH_BYTES", 1)
        monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    for seed, (heads, groups, positions, length, size) in enumerate(
        [(1, 1, 1, 1, 2), (4, 2, 9, 5, 16), (6, 3, 40, 40, 12), (8, 1, 300, 257, 64), (5, 5, 3, 2, 7)]
    ):
        query = random(heads, size, seed=seed) * 3
        keys, values = (random(groups, positions, size, seed=seed + 1 + part).to(dtype) for part in range(2))
        keys[:, length:] = values[:, length:] = torch.nan  # nothing is there yet
        out = np.full((heads, size), np.nan, np.float32)
        attend(dtype, query.numpy(), bits(keys), bits(values), (0, length), 0.3, out)
        for head in range(heads):
            group = head // (heads // groups)
            scores = keys[group, :length].double() @ query[head].double() * 0.3
            close(out[head], scores.softmax(0) @ values[group, :length].double())

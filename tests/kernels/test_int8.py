"""The int8 product against the oracle, on every backend that this CPU can run."""

import pytest
import torch

from tests import naive_formats as naive
from tests.kernels.families import each_backend
from tests.kernels.test_bitmap import at_the_end_of_memory
from toolkit.errors import UserError
from toolkit.kernels import int8
from toolkit.kernels.runtime import backends

SHAPES = [(0, 0), (0, 32), (3, 0), (1, 1), (4, 16), (5, 31), (4, 32), (7, 33), (9, 64), (13, 1000), (3, 36_867)]


backend = each_backend(int8)


def integers(shape, seed=0):
    return torch.randint(-128, 128, shape, dtype=torch.int8, generator=torch.Generator().manual_seed(seed))


def vectors(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("batch", [1, 3, 4, 5, 16])
def test_any_shape(backend, batch):
    for seed, shape in enumerate(SHAPES):
        weight, x = integers(shape, seed), vectors(batch, shape[1], seed=seed)
        y = int8.matvec(weight, x, backend=backend)
        assert y.dtype == torch.float32
        assert y.shape == (batch, shape[0])
        for result, vector in zip(y, x, strict=True):
            expected, magnitude = naive.matvec(weight, vector)
            assert ((result - expected).abs() <= 4e-7 * max(4, shape[1] ** 0.5) * magnitude).all(), shape


def test_random_shapes(backend):
    generator = torch.Generator().manual_seed(1)
    for seed in range(40):
        rows, columns, batch = (int(torch.randint(1, most, (), generator=generator)) for most in (20, 200, 18))
        weight = integers((rows, columns), seed)
        x = torch.randint(-9, 9, (batch, columns), generator=generator).float()
        expected = [[sum(a * b for a, b in zip(row, v, strict=True)) for row in weight.tolist()] for v in x.tolist()]
        assert int8.matvec(weight, x, backend=backend).tolist() == expected, "small integers: exact"


def test_one_vector_is_a_batch_of_one_and_fills_out(backend):
    weight, x = integers((9, 50)), vectors(50)
    out = torch.full((9,), 3.0)
    assert int8.matvec(weight, x, out, backend=backend) is out
    assert torch.equal(out, int8.matvec(weight, x[None], backend=backend)[0])
    assert int8.matvec(weight, vectors(0, 50), backend=backend).shape == (0, 9)


def test_neither_batch_nor_threads_change_a_sum(backend):
    weight, x = integers((1027, 1001)), vectors(7, 1001)
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found += [int8.matvec(weight, x, backend=backend)]
            found += [torch.stack([int8.matvec(weight, vector, backend=backend) for vector in x])]
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(found[0], other) for other in found[1:])


@pytest.mark.parametrize("x_dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_x_of_other_types_is_taken_as_fp32(backend, x_dtype):
    weight, x = integers((5, 40)), vectors(2, 40).to(x_dtype)
    assert torch.equal(int8.matvec(weight, x, backend=backend), int8.matvec(weight, x.float(), backend=backend))


@pytest.mark.parametrize("columns", [31, 64, 1000])
def test_nothing_is_read_beyond_the_weights(backend, columns):
    """A read too many would end the process."""
    weight, x = integers((5, columns)), vectors(4, columns)
    ends = at_the_end_of_memory(weight), at_the_end_of_memory(x)
    assert torch.equal(int8.matvec(*ends, backend=backend), int8.matvec(weight, x, backend=backend))


def test_x_may_be_out_and_complex_x_or_a_gradient_is_refused(backend):
    weight, x = integers((40, 40)), vectors(40)
    expected = int8.matvec(weight, x, backend=backend)
    assert torch.equal(int8.matvec(weight, x, x, backend=backend), expected)
    with pytest.raises(ValueError, match=r"x is torch.complex64.*expected real numbers"):
        int8.matvec(weight, x.to(torch.complex64), backend=backend)
    with pytest.raises(ValueError, match=r"requires a gradient.*pass x.detach"):
        int8.matvec(weight, vectors(40).requires_grad_(), backend=backend)


def test_wrong_arguments_are_refused(monkeypatch):
    weight, x = integers((4, 40)), vectors(40)
    with pytest.raises(ValueError, match=r"weight is torch.uint8 \[4, 40\]; expected torch.int8"):
        int8.matvec(weight.view(torch.uint8), x)
    with pytest.raises(ValueError, match="weight must be contiguous and on cpu"):
        int8.matvec(integers((40, 4)).T, x)
    with pytest.raises(ValueError, match=r"x is torch.float32 \[39\]; expected torch.float32 \[40\]"):
        int8.matvec(weight, x[:39])
    with pytest.raises(ValueError, match=r"out is torch.float32 \[5\]; expected torch.float32 \[4\]"):
        int8.matvec(weight, x, torch.empty(5))
    with pytest.raises(UserError, match="unknown backend 'cuda'; choose from: auto, avx2, portable"):
        int8.matvec(weight, x, backend="cuda")
    monkeypatch.setattr(backends, "host_has", lambda feature: feature != "fma")
    with pytest.raises(UserError, match="backend 'avx2' needs a CPU with fma; this one can run: portable"):
        int8.matvec(weight, x, backend="avx2")

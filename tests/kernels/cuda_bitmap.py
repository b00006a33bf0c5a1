"""The CUDA bitmap kernels against the oracle. `test_cuda.py` runs this file: in Numba's simulator, which takes
tensors on the CPU, and on a GPU where there is one, with larger matrices added."""

import dataclasses

import numpy as np
import pytest
import torch

from tests import naive_formats as naive
from tests.kernels.families import DEVICE, DTYPES, SIMULATED, product, random, sparse
from toolkit.kernels import bitmap
from toolkit.kernels.bitmap import cuda as kernels


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request):
    return request.param


def decompressed(matrix):
    out = torch.full(matrix.shape, 3, dtype=matrix.dtype, device=DEVICE)  # every element must be written, zeros too
    assert bitmap.decompress(bitmap.encode(matrix).to(DEVICE), out, backend="cuda") is out
    return out.cpu()


def vectors(batch, columns, dtype=torch.float32):
    return random(batch, columns, seed=columns).to(dtype).to(DEVICE)


def is_product(y, matrix, x):
    expected, magnitude = product(matrix, x.cpu())
    return bool(((y.cpu() - expected).abs() <= 4e-7 * max(4, matrix.shape[1] ** 0.5) * magnitude).all())


def multiplied(matrix, x):
    return bitmap.matvec(bitmap.encode(matrix).to(DEVICE), x, backend="cuda")


def test_decompress_keeps_every_bit(dtype):
    kind = {1: np.uint8, 2: np.uint16, 4: np.uint32}[dtype.itemsize]
    found = np.random.default_rng(0).integers(0, np.iinfo(kind).max, (3, 160), kind, endpoint=True)
    matrix = torch.from_numpy(found).view(dtype)
    assert naive.same_bits(decompressed(matrix), naive.canonical(matrix))


def test_decompress_into_memory_that_is_not_aligned():
    matrix = sparse((2, 64), torch.float16, 0.5)
    room = torch.full((2 * 64 + 1,), 3, dtype=torch.float16, device=DEVICE)
    out = room[1:].view(2, 64)
    bitmap.decompress(bitmap.encode(matrix).to(DEVICE), out, backend="cuda")
    assert torch.equal(out.cpu(), matrix)
    assert room[0] == 3


def test_x_that_is_not_aligned():
    matrix = sparse((3, 40), torch.float16, 0.5)
    x = torch.cat([torch.full((1,), 99.0, device=DEVICE), vectors(1, 40)[0]]).half()[1:]
    assert is_product(multiplied(matrix, x)[None], matrix, x[None])


@pytest.mark.parametrize("multiprocessors", [0, 10_000])
def test_any_number_of_warps_to_a_row(multiprocessors, monkeypatch):
    """None shared, and two that take the first and third block, and the second."""
    monkeypatch.setattr(kernels, "multiprocessors", lambda device: multiprocessors)
    matrix = sparse((2, 8192 + 40), torch.int8, 0.5)
    x = vectors(1, 8192 + 40)
    assert is_product(multiplied(matrix, x), matrix, x)


def test_matvec_of_zeros_infinities_and_nan():
    matrix = torch.zeros(4, 64, dtype=torch.float16)
    assert not multiplied(matrix, vectors(2, 64)).any()
    matrix[0, 5], matrix[1, 40], matrix[2, 63], matrix[3, 0] = torch.inf, -torch.inf, torch.nan, 2**-24
    y = multiplied(matrix, torch.ones(64, device=DEVICE))
    assert y[:2].tolist() == [torch.inf, -torch.inf]
    assert y[2].isnan()
    assert y[3] == 2**-24


def test_values_in_the_middle_of_a_larger_store():
    """Offsets that do not start at zero: the values of row 3 on, of a matrix that was packed as a whole."""
    matrix = sparse((7, 100), torch.float16, 0.5)
    whole = bitmap.encode(matrix)
    part = dataclasses.replace(whole).to(DEVICE)
    object.__setattr__(part, "shape", (4, 100))  # what no `Bitmap` may be made of
    for name in ("bitmap", "row_offsets", "block_offsets"):
        object.__setattr__(part, name, getattr(part, name)[3:].contiguous())
    out = torch.empty(4, 100, dtype=torch.float16, device=DEVICE)
    kernels.decompress(part, out)
    assert torch.equal(out.cpu(), matrix[3:])
    x = vectors(1, 100)
    y = torch.empty(1, 4, device=DEVICE)
    kernels.matvec(part, x, y)
    assert is_product(y, matrix[3:], x)


@pytest.mark.skipif(SIMULATED, reason="takes a GPU's memory")
def test_more_values_than_32_bits_count():
    """2³¹ + 2³⁰ values, all ones but the last row's."""
    rows, columns = 49_153, 65_536
    matrix = torch.ones(rows, columns, dtype=torch.int8)
    matrix[-1] = torch.arange(columns) % 100 + 1
    encoded = bitmap.encode(matrix).to(DEVICE)
    assert encoded.values.numel() == rows * columns > 2**31
    assert torch.equal(bitmap.decompress(encoded), matrix.to(DEVICE))
    x = torch.zeros(columns, device=DEVICE)
    x[-1] = 1
    assert torch.equal(bitmap.matvec(encoded, x), matrix[:, -1].float().to(DEVICE))


@pytest.mark.skipif(SIMULATED, reason="the simulator has no streams")
def test_runs_on_the_current_stream():
    matrix = sparse((300, 4096), torch.float16, 0.5)
    encoded, stream = bitmap.encode(matrix).to(DEVICE), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        out = torch.empty(matrix.shape, dtype=torch.float16, device=DEVICE)
        torch.cuda._sleep(100_000_000)
        out.fill_(3)  # must happen first
        assert torch.equal(bitmap.decompress(encoded, out).cpu(), matrix)

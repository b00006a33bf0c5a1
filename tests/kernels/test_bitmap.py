"""Every backend against the oracle."""

import ctypes
import dataclasses
import mmap
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import numba
import numpy as np
import pytest
import torch

from tests import naive_formats as naive
from tests.kernels.families import each_backend
from toolkit.errors import UserError
from toolkit.formats import encode
from toolkit.kernels import bitmap
from toolkit.kernels.bitmap import cpu_simd
from toolkit.kernels.common import simd
from toolkit.kernels.runtime import backends
from toolkit.kernels.runtime.compiled import COMPILE

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.int8)
SHAPES = [(0, 0), (0, 64), (3, 0), (1, 1), (5, 31), (4, 32), (7, 33), (3, 100), (9, 64), (2, 256), (6, 1000)]
SPARSITIES = (0, 0.5, 0.9, 1)


backend = each_backend(bitmap)


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request):
    return request.param


def sparse(shape, dtype, sparsity, seed=0):
    generator = torch.Generator().manual_seed(seed)
    matrix = (torch.randn(shape, generator=generator) * 20).to(dtype)
    return matrix.masked_fill_(torch.rand(shape, generator=generator) < sparsity, 0)


@pytest.mark.parametrize("sparsity", SPARSITIES)
def test_decompress_any_shape(backend, dtype, sparsity):
    for seed, shape in enumerate(SHAPES):
        matrix = sparse(shape, dtype, sparsity, seed)
        out = torch.full(shape, 3, dtype=dtype)  # every element must be written, zeros too
        assert bitmap.decompress(bitmap.encode(matrix), out, backend) is out
        assert naive.same_bits(out, naive.canonical(matrix)), shape


def test_decompress_keeps_every_bit(backend, dtype):
    kind = {1: np.uint8, 2: np.uint16, 4: np.uint32}[dtype.itemsize]
    found = np.random.default_rng(0).integers(0, np.iinfo(kind).max, (50, 160), kind, endpoint=True)
    matrix = torch.from_numpy(found).view(dtype)
    assert naive.same_bits(bitmap.decompress(bitmap.encode(matrix), backend=backend), naive.canonical(matrix))


def test_every_pattern_of_a_byte_in_every_place(backend, dtype):
    """The rows hold all 256 patterns in the first, second, third and fourth byte of a word."""
    patterns = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    rows = np.zeros((4, 256, 4, 8), np.uint8)
    for place in range(4):
        rows[place, :, place] = patterns
    rows = rows.reshape(1024, 32) * np.arange(1, 33, dtype=np.uint8)
    matrix = torch.from_numpy(rows).to(dtype)
    encoded = bitmap.encode(matrix)
    assert torch.equal(bitmap.decompress(encoded, backend=backend), matrix)
    x = torch.arange(32.0)
    assert torch.equal(bitmap.matvec(encoded, x, backend=backend), matrix.float() @ x)  # small integers: exact


def test_streaming_past_the_caches_writes_the_same(backend, dtype, monkeypatch):
    monkeypatch.setattr(bitmap, "STREAM_BYTES", 0)
    for columns in (64, 128, 192, 96):  # the last fills no whole cache lines, but in fp32
        matrix = sparse((70, columns), dtype, 0.5)
        assert torch.equal(bitmap.decompress(bitmap.encode(matrix), backend=backend), matrix)
    room = torch.zeros(70 * 64 + 1, dtype=dtype)
    matrix = sparse((70, 64), dtype, 0.5)
    out = room[1:].view(70, 64)  # not aligned to a cache line
    assert torch.equal(bitmap.decompress(bitmap.encode(matrix), out, backend), matrix)


@pytest.mark.parametrize("sparsity", SPARSITIES)
def test_matvec_any_shape(backend, dtype, sparsity):
    for seed, shape in enumerate(SHAPES):
        matrix = sparse(shape, dtype, sparsity, seed)
        x = torch.randn(shape[1], generator=torch.Generator().manual_seed(seed))
        y = bitmap.matvec(bitmap.encode(matrix), x, backend=backend)
        expected, magnitude = naive.matvec(matrix, x)
        assert y.dtype == torch.float32
        assert y.shape == (shape[0],)
        assert ((y - expected).abs() <= 4e-7 * max(4, shape[1] ** 0.5) * magnitude).all(), shape


@pytest.mark.parametrize("x_dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_matvec_takes_x_of_other_types_as_fp32(backend, x_dtype):
    matrix, x = sparse((8, 96), torch.bfloat16, 0.5), torch.randn(96, generator=torch.Generator().manual_seed(1))
    encoded, x = bitmap.encode(matrix), x.to(x_dtype)
    assert torch.equal(
        bitmap.matvec(encoded, x, backend=backend), bitmap.matvec(encoded, x.float().contiguous(), backend=backend)
    )


def test_matvec_of_infinities_and_nan(backend):
    matrix = torch.zeros(4, 64, dtype=torch.float16)
    matrix[0, 5], matrix[1, 40], matrix[2, 63], matrix[3, 0] = torch.inf, -torch.inf, torch.nan, 2**-24
    y = bitmap.matvec(bitmap.encode(matrix), torch.ones(64), backend=backend)
    assert y[:2].tolist() == [torch.inf, -torch.inf]
    assert y[2].isnan()
    assert y[3] == 2**-24


@pytest.mark.parametrize("columns", [1, 4095, 4096, 4097, 8193])
def test_block_offsets_count_the_values_before_each_block(columns):
    matrix = sparse((3, columns), torch.int8, 0.5)
    found = bitmap.encode(matrix)
    found.check()
    before = [[int((row[:start] != 0).sum()) for start in range(0, columns, 4096)] for row in matrix]
    assert found.block_offsets.tolist() == before


@pytest.mark.parametrize("columns", [36_864, 65_537])
def test_wide_rows(backend, columns):
    matrix = sparse((3, columns), torch.bfloat16, 0.5)
    encoded, x = bitmap.encode(matrix), torch.randn(columns, generator=torch.Generator().manual_seed(2))
    assert torch.equal(bitmap.decompress(encoded, backend=backend), matrix)
    expected, magnitude = naive.matvec(matrix, x)
    assert ((bitmap.matvec(encoded, x, backend=backend) - expected).abs() <= 1e-5 * magnitude).all()


def test_all_fp16_and_bf16_numbers(backend):
    """One number a row, times one: the conversion to fp32 must be exact; each backend's fast and bitwise way."""
    for dtype in (torch.float16, torch.bfloat16):
        numbers = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
        matrix = torch.zeros(len(numbers), 33, dtype=dtype)
        matrix[:, 7] = numbers
        fast = bitmap.matvec(bitmap.encode(matrix), torch.ones(33), backend=backend)
        matrix = matrix.flip(1)[:, 25:]  # fewer columns than a word
        bitwise = bitmap.matvec(bitmap.encode(matrix.contiguous()), torch.ones(8), backend=backend)
        for y in (fast, bitwise):
            assert torch.equal(y.nan_to_num(1234.5), numbers.float().nan_to_num(1234.5))


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_any_number_of_threads_gives_the_same(backend, threads):
    matrix, x = sparse((515, 1024), torch.bfloat16, 0.5), torch.ones(1024)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        encoded = bitmap.encode(matrix)
        assert torch.equal(bitmap.decompress(encoded, backend=backend), matrix)
        y = bitmap.matvec(encoded, x, backend=backend)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(y, bitmap.matvec(encoded, x, backend=backend))


def test_callers_in_several_threads(backend):
    matrices = [sparse((300, 1024), torch.float16, 0.5, seed) for seed in range(4)]
    encoded = [bitmap.encode(matrix) for matrix in matrices]
    barrier = threading.Barrier(4)

    def work(index):
        barrier.wait()
        return all(torch.equal(bitmap.decompress(encoded[index], backend=backend), matrices[index]) for _ in range(10))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(4)))


def at_the_end_of_memory(tensor):
    """A copy whose last byte is the last of a page, followed by one that may not be touched."""
    page = mmap.PAGESIZE
    pages = -(-tensor.nbytes // page)
    memory = mmap.mmap(-1, (pages + 1) * page)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(address + pages * page), page, 0) == 0
    copy = torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(), offset=pages * page - tensor.nbytes)
    return copy.view(tensor.shape).copy_(tensor)


@pytest.mark.parametrize("columns", [64, 1000])
def test_nothing_is_read_beyond_the_values(backend, dtype, columns):
    """A read too many would end the process."""
    for sparsity in (0.05, 0.5, 0.99):
        matrix = sparse((5, columns), dtype, sparsity)
        found = bitmap.encode(matrix)
        values = at_the_end_of_memory(found.values)
        encoded = dataclasses.replace(found, values=values)
        assert torch.equal(bitmap.decompress(encoded, backend=backend), matrix)
        bitmap.matvec(encoded, torch.ones(columns), backend=backend)


WILD = (-(1 << 62), -(1 << 40), -1, 1, 1 << 31, 1 << 40, (1 << 62) - 1)


@pytest.mark.parametrize("columns", [31, 1000])
def test_wild_offsets_and_bits_are_never_followed(backend, dtype, columns):
    """Contents that no writer makes: a kernel gives any numbers, but reads and writes nothing outside."""
    rng = np.random.default_rng(columns)
    found = bitmap.encode(sparse((5, columns), dtype, 0.5))
    x, out = at_the_end_of_memory(torch.ones(columns)), at_the_end_of_memory(torch.empty(5, columns, dtype=dtype))
    for _ in range(8):
        offsets, bits = found.row_offsets.clone(), found.bitmap.clone()
        inner = rng.integers(1, len(offsets) - 1, 2).tolist()
        offsets[inner] = torch.tensor(rng.choice(WILD, 2))
        bits[rng.integers(len(bits))] = 255  # more bits than there are values
        values = at_the_end_of_memory(found.values)
        harmed = dataclasses.replace(found, bitmap=bits, row_offsets=offsets, values=values)
        bitmap.decompress(harmed, out, backend)
        bitmap.matvec(harmed, x, backend=backend)
        bitmap.columns(harmed, torch.int32)
        with pytest.raises(ValueError, match=r"bits set|beyond column"):
            harmed.check()
        bitmap.matvec(harmed, torch.stack([x, x]), backend=backend)


def test_x_may_be_out_and_complex_x_or_a_gradient_is_refused(backend):
    matrix = sparse((40, 40), torch.float16, 0.5)
    encoded, x = bitmap.encode(matrix), torch.linspace(-1, 1, 40)
    expected = bitmap.matvec(encoded, x, backend=backend)
    memory = torch.cat([x, torch.zeros(1)])
    assert torch.equal(bitmap.matvec(encoded, memory[:40], memory[1:], backend), expected)  # partly the same memory
    assert torch.equal(bitmap.matvec(encoded, x, x, backend), expected)
    with pytest.raises(ValueError, match=r"x is torch.complex64.*expected real numbers"):
        bitmap.matvec(encoded, torch.ones(40, dtype=torch.complex64), backend=backend)
    leaf = torch.ones(40, requires_grad=True)
    with pytest.raises(ValueError, match=r"requires a gradient.*pass x.detach"):
        bitmap.matvec(encoded, leaf, backend=backend)
    with torch.no_grad():
        assert torch.equal(
            bitmap.matvec(encoded, leaf, backend=backend), bitmap.matvec(encoded, leaf.detach(), backend=backend)
        )


def test_backends_that_cannot_run_are_refused(monkeypatch):
    encoded = bitmap.encode(torch.ones(2, 2))
    with pytest.raises(UserError, match="unknown backend 'gpu'; choose from: auto, avx2, avx512, cuda"):
        bitmap.decompress(encoded, backend="gpu")
    monkeypatch.setattr(backends, "host_has", lambda feature: feature != "avx512vbmi2")
    with pytest.raises(UserError, match="backend 'avx512' needs a CPU with avx512vbmi2; this one can run: avx2"):
        bitmap.matvec(encoded, torch.ones(2), backend="avx512")
    monkeypatch.setattr(backends, "host_has", lambda feature: False)
    assert bitmap.available() == ["portable"]


def test_products_of_several_vectors(backend, dtype):
    for seed, shape in enumerate(SHAPES):
        matrix = sparse(shape, dtype, 0.5, seed)
        x = torch.randn(seed % 6, shape[1], generator=torch.Generator().manual_seed(seed))
        out = torch.full((len(x), shape[0]), 3.0)
        assert bitmap.matvec(bitmap.encode(matrix), x, out, backend) is out
        for result, vector in zip(out, x, strict=True):
            expected, magnitude = naive.matvec(matrix, vector)
            assert ((result - expected).abs() <= 4e-7 * max(4, shape[1] ** 0.5) * magnitude).all(), shape


@pytest.mark.skipif("avx512" not in bitmap.available(), reason="needs AVX-512 with VBMI2")
def test_avx512_expands_in_a_register():
    """The form of the instruction that reads memory is slow on AMD."""

    @numba.njit(**COMPILE)
    def expand(values, word, out):
        simd.store(out, 0, cpu_simd.by_instruction(values, 0, word))

    expand(np.arange(32, dtype=np.uint16), np.uint32(3), np.zeros(32, np.uint16))
    (code,) = expand.inspect_asm().values()
    expanding = [line for line in code.splitlines() if "vpexpandw" in line]
    assert expanding
    assert not any("(" in line for line in expanding)


def test_wrong_arguments_are_refused_before_any_kernel_runs():
    encoded = bitmap.encode(sparse((4, 40), torch.float16, 0.5))
    with pytest.raises(ValueError, match=r"out is torch.float16 \[4, 41\]; expected torch.float16 \[4, 40\]"):
        bitmap.decompress(encoded, torch.empty(4, 41, dtype=torch.float16))
    with pytest.raises(ValueError, match=r"out is torch.bfloat16"):
        bitmap.decompress(encoded, torch.empty(4, 40, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="out must be contiguous"):
        bitmap.decompress(encoded, torch.empty(40, 4, dtype=torch.float16).T)
    with pytest.raises(ValueError, match=r"x is torch.float32 \[39\]"):
        bitmap.matvec(encoded, torch.ones(39))
    with pytest.raises(ValueError, match=r"out is torch.float64 \[4\]"):
        bitmap.matvec(encoded, torch.ones(40), torch.empty(4, dtype=torch.float64))
    with pytest.raises(ValueError, match="row offsets do not run from 0"):
        dataclasses.replace(encoded, values=encoded.values[:-1])
    with pytest.raises(ValueError, match="bitmap is"):
        dataclasses.replace(encoded, shape=(4, 65))
    with pytest.raises(ValueError, match=r"block_offsets is torch.int32 \[4, 1\]; expected torch.int32 \[4, 2\]"):
        dataclasses.replace(bitmap.encode(torch.ones(4, 4097)), block_offsets=encoded.block_offsets)
    with pytest.raises(ValueError, match=r"values are torch.float64; expected one of float32, float16"):
        dataclasses.replace(encoded, values=encoded.values.double())
    with pytest.raises(ValueError, match="bitmap must be contiguous and on meta"):
        dataclasses.replace(encoded, values=encoded.values.to("meta"))
    with pytest.raises(UserError, match="these tensors are on meta"):
        bitmap.decompress(encoded.to("meta"), backend="portable")
    with pytest.raises(ValueError, match="x must be contiguous and on cpu"):
        bitmap.matvec(encoded, torch.ones(40, device="meta"))
    with pytest.raises(ValueError, match=r"x is torch.float32 \[2, 39\]; expected torch.float32 \[2, 40\]"):
        bitmap.matvec(encoded, torch.ones(2, 39))
    with pytest.raises(ValueError, match=r"x is torch.float32 \[1, 2, 40\]"):
        bitmap.matvec(encoded, torch.ones(1, 2, 40))
    with pytest.raises(ValueError, match=r"out is torch.float32 \[4\]; expected torch.float32 \[2, 4\]"):
        bitmap.matvec(encoded, torch.ones(2, 40), torch.empty(4))


def test_columns_of_the_values():
    matrix = sparse((20, 70), torch.int8, 0.7)
    assert bitmap.columns(bitmap.encode(matrix), torch.int32).tolist() == naive.csr(matrix)[1]


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_process_can_decode():
    """It has none of its parent's threads, and must not wait for them; nor must torch's products."""
    matrix = sparse((600, 1024), torch.float16, 0.5)
    encoded, out = bitmap.encode(matrix), torch.empty_like(matrix)
    bitmap.decompress(encoded)  # so that the threads exist
    product = matrix.float() @ matrix.float().T
    child = os.fork()
    if child == 0:
        signal.alarm(30)
        bitmap.decompress(encoded, out)
        torch.testing.assert_close(matrix.float() @ matrix.float().T, product)
        os._exit(0 if np.array_equal(bitmap._bits(out), bitmap._bits(matrix)) else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_to_a_device_keeps_the_kind_and_what_it_holds():
    matrix = sparse((3, 70), torch.float16, 0.5)
    packed = encode("endor", matrix)
    moved = packed.to("cpu", non_blocking=True)
    assert type(moved) is type(packed)
    assert moved.device == torch.device("cpu")
    assert torch.equal(moved.decode(), matrix)

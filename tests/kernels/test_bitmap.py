"""Every backend against the oracle."""

import numba
import numpy as np
import pytest
import torch

from tests import naive_formats as naive
from tests.kernels.families import DTYPES, each_backend, each_with_one, harmed_bitmap, sparse
from toolkit.kernels import bitmap
from toolkit.kernels.bitmap import cpu_simd
from toolkit.kernels.engine import simd
from toolkit.kernels.engine.compiled import COMPILE

backend = each_backend(bitmap.BACKENDS)
of_types = pytest.mark.parametrize(("backend", "dtype"), each_with_one(bitmap.BACKENDS.available(), DTYPES))


@of_types
def test_decompress_keeps_every_bit(backend, dtype):
    kind = {1: np.uint8, 2: np.uint16, 4: np.uint32}[dtype.itemsize]
    found = np.random.default_rng(0).integers(0, np.iinfo(kind).max, (50, 160), kind, endpoint=True)
    matrix = torch.from_numpy(found).view(dtype)
    assert naive.same_bits(bitmap.decompress(bitmap.encode(matrix), backend=backend), naive.canonical(matrix))


@of_types
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


@of_types
def test_streaming_past_the_caches_writes_the_same(backend, dtype, monkeypatch):
    monkeypatch.setattr(bitmap, "STREAM_BYTES", 0)
    for columns in (64, 128, 192, 96):  # the last fills no whole cache lines, but in fp32
        matrix = sparse((70, columns), dtype, 0.5)
        assert torch.equal(bitmap.decompress(bitmap.encode(matrix), backend=backend), matrix)
    room = torch.zeros(70 * 64 + 1, dtype=dtype)
    matrix = sparse((70, 64), dtype, 0.5)
    out = room[1:].view(70, 64)  # not aligned to a cache line
    assert torch.equal(bitmap.decompress(bitmap.encode(matrix), out, backend), matrix)


def test_contents_that_contradict_each_other_are_refused():
    generator = torch.Generator().manual_seed(64)
    for columns in (64, 1000, 4104):
        harmed = harmed_bitmap(bitmap.encode(sparse((5, columns), torch.float16, 0.5)), generator)
        assert bitmap.columns(harmed, torch.int32).shape == harmed.values.shape, "reads nothing outside"
        with pytest.raises(ValueError, match=r"bits set|beyond column|its offset"):
            harmed.check()


def test_block_offsets_count_the_values_before_each_block():
    for columns in (1, 4095, 4096, 4097, 8193):
        matrix = sparse((3, columns), torch.int8, 0.5)
        found = bitmap.encode(matrix)
        found.check()
        before = [[int((row[:start] != 0).sum()) for start in range(0, columns, 4096)] for row in matrix]
        assert found.block_offsets.tolist() == before


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


@pytest.mark.skipif("avx512" not in bitmap.BACKENDS.available(), reason="needs AVX-512 with VBMI2")
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

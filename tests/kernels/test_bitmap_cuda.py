"""The CUDA bitmap kernels: compiled to PTX (`test_cuda.py` runs them), launch sizes."""

import re

import numba
import numpy as np
import pytest
import torch

from tests.kernels.families import needs_numba_cuda, ptx_of
from toolkit.errors import UserError
from toolkit.kernels import bitmap
from toolkit.kernels.runtime import backends

WORDS = {torch.float32: "b32|u32|f32", torch.float16: "b16|u16", torch.bfloat16: "b16|u16", torch.int8: "b8|u8"}
# no kernel has code for one kind of GPU alone, so types have them in turns
TARGETS = [*zip(WORDS, [(8, 0), (9, 0), (8, 9), (8, 0)], strict=True)]


@pytest.fixture
def kernels():
    if not backends.find_spec("numba_cuda"):
        pytest.skip("needs numba-cuda: pip install -e '.[cuda]'")
    from toolkit.kernels.bitmap import cuda

    return cuda


def compiled(kernel, dtype, outputs, cc):
    """The PTX of a kernel for elements of this type."""
    from numba import types

    element = {1: "uint8", 2: "uint16", 4: "uint32"}[dtype.itemsize]
    inputs = ("uint32", 2), ("int64", 1), ("int32", 2), (element, 1)
    outputs = [(element if kind == "element" else kind, 2) for kind in outputs]
    return ptx_of(kernel, cc, *inputs, *outputs, types.int64)


@needs_numba_cuda
@pytest.mark.parametrize(("dtype", "cc"), TARGETS, ids=str)
def test_decompress_compiles_to_what_it_should_be(kernels, dtype, cc):
    ptx = compiled(kernels.decompress_kernel(dtype, True), dtype, ["uint64"], cc)
    assert len(re.findall(r"shfl\.sync\.up", ptx)) == 5
    assert "prefetch.global.L2" in ptx
    assert re.search(r"st\.global\.(u64|b64|v2)", ptx), "eight bytes a lane, as one"
    assert re.search(rf"ld\.global\.({WORDS[dtype]})", ptx)
    assert "ld.global.u64" in ptx, "row offsets are 64-bit"
    if (dtype, cc) == (torch.float16, (9, 0)):
        ptx = compiled(kernels.decompress_kernel(dtype, False), dtype, ["element"], cc)
        assert not re.search(r"st\.global\.(u64|b64|v2)", ptx)


@needs_numba_cuda
@pytest.mark.parametrize(("dtype", "cc"), TARGETS, ids=str)
def test_matvec_compiles_to_what_it_should_be(kernels, dtype, cc):
    x_dtype = torch.float32 if dtype == torch.float32 else torch.float16
    ptx = compiled(kernels.matvec_kernel(dtype, x_dtype, 1), dtype, ["uint64", "float32"], cc)
    additions = len(re.findall(r"fma\.rn\.f32", ptx))
    assert additions >= kernels.ROWS
    assert additions % kernels.ROWS == 0
    assert len(re.findall(r"shfl\.sync\.up", ptx)) == 5 * kernels.ROWS
    assert len(re.findall(r"shfl\.sync\.bfly", ptx)) == 5 * kernels.ROWS
    assert "ld.global.u64" in ptx
    if dtype == torch.float16:
        assert "cvt.f32.f16" in ptx, "in one instruction"
    if (dtype, cc) == (torch.float16, (9, 0)):
        ptx = compiled(kernels.matvec_kernel(dtype, x_dtype, 16), dtype, ["uint64", "float32"], cc)
        assert len(re.findall(r"fma\.rn\.f32", ptx)) % (16 * kernels.ROWS) == 0


@needs_numba_cuda
@pytest.mark.parametrize("kind", [np.uint8, np.uint16, np.uint32])
def test_places_beyond_32_bits(kernels, kind, tmp_path):
    """The kernels' address arithmetic, the same source compiled for the CPU, on a file with a hole."""
    from toolkit.kernels.common.gpu import address, item

    place = numba.njit(kernels.value_place.py_func)
    row_offsets = np.array([0, 2**31 - 2, 2**31 + 2**20], np.int64)
    block_offsets = np.array([[0, 0], [0, 5], [0, 7]], np.int32)
    found = place(row_offsets, block_offsets, np.uint64(1), np.uint64(1))
    assert found == 2**31 + 3

    @numba.njit
    def read(values, place, distance):
        return item(values, address(values, place), distance)

    values = np.asarray(np.memmap(tmp_path / "values", kind, "w+", shape=(2**31 + 64,)))
    values[[0, 3, 2**31 + 3, 2**31 + 9]] = [1, 2, 3, 4]
    assert read(values, np.uint64(found), np.uint32(0)) == 3
    assert read(values, np.uint64(found), np.uint32(6)) == 4
    assert read(values, np.uint64(0), np.uint32(2**31 + 9)) == 4  # distances are unsigned


@pytest.mark.parametrize("shape", [(1, 1), (3, 100), (9216, 9216), (9216, 36_864), (70_000, 40), (2**31 + 9, 5000)])
def test_decompress_launches_a_warp_for_each_block(kernels, shape):
    rows, columns = shape
    launch = kernels.decompress_launch(rows, columns)
    warps = launch.threads[1]
    assert launch.threads == (32, warps, 1)
    assert 1 <= warps <= kernels.WARPS
    assert rows <= launch.grid[0] * warps < rows + warps, "all rows, and none for nothing but in the last thread block"
    assert launch.grid[1] == -(-columns // 4096)
    assert launch.grid[0] < 2**31


def test_decompress_refuses_more_columns_than_a_grid_has_room_for(kernels):
    assert kernels.decompress_launch(1, 65_535 * 4096).grid == (1, 65_535)
    with pytest.raises(ValueError, match="268431361 columns are more than a GPU's grid has room for"):
        kernels.decompress_launch(1, 65_535 * 4096 + 1)


@pytest.mark.parametrize("multiprocessors", [1, 24, 132])
@pytest.mark.parametrize("shape", [(1, 1), (9, 9), (13, 65_537), (576, 1536), (9216, 36_864), (128_256, 8192)])
def test_matvec_launches_cover_all_rows_and_no_more_warps_than_there_are_blocks(kernels, shape, multiprocessors):
    rows, columns = shape
    launch = kernels.matvec_launch(rows, columns, multiprocessors)
    lanes, split, groups = launch.threads
    assert (lanes, launch.grid[1]) == (32, 1)
    assert 1 <= split * groups <= kernels.WARPS
    assert split & (split - 1) == 0
    assert split <= max(1, -(-columns // 4096))
    covered = launch.grid[0] * groups * kernels.ROWS
    assert rows <= covered < rows + kernels.ROWS * groups


def test_matvec_shares_rows_only_where_the_gpu_would_be_idle(kernels):
    assert kernels.matvec_launch(128_256, 16_384, 132).threads == (32, 1, 4)
    assert kernels.matvec_launch(64, 16_384, 132).threads == (32, 4, 1)
    assert kernels.matvec_launch(64, 8192, 132).threads == (32, 2, 2)
    assert kernels.matvec_launch(64, 4096, 132).threads == (32, 1, 4)
    assert kernels.matvec_launch(64, 16_384, 1).threads == (32, 1, 4)


def test_without_numba_cuda_or_a_gpu_the_error_says_so(monkeypatch):
    encoded = bitmap.encode(torch.ones(2, 2))
    monkeypatch.setenv("NUMBA_ENABLE_CUDASIM", "0")
    monkeypatch.setattr(backends, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"'cuda' needs numba-cuda: pip install -e '\.\[cuda\]'"):
        bitmap.decompress(encoded, backend="cuda")
    monkeypatch.setattr(backends, "find_spec", lambda name: "found")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match="backend 'cuda' needs a CUDA GPU, and torch sees none; use backend='auto'"):
        bitmap.matvec(encoded, torch.ones(2), backend="cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(UserError, match="works on a GPU; the tensors are on cpu: move them with"):
        bitmap.decompress(encoded, backend="cuda")

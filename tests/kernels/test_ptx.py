"""The CUDA kernels compiled to PTX, without a GPU, and the sizes of their launches. `test_cuda.py` runs them."""

import re
import subprocess
import sys
from pathlib import Path

import numba
import numpy as np
import pytest
import torch

from tests.kernels.families import needs_numba_cuda, ptx_of
from toolkit.errors import UserError
from toolkit.kernels import bitmap, csr, neurons, spqr
from toolkit.kernels.engine import backends

pytestmark = needs_numba_cuda
# no kernel has code for one kind of GPU alone, so types have them in turns
TARGETS = [*zip(bitmap.SIGNIFICANT, [(8, 0), (9, 0), (8, 9), (8, 0)], strict=True)]
WORDS = {torch.float32: "b32|u32|f32", torch.float16: "b16|u16", torch.bfloat16: "b16|u16", torch.int8: "b8|u8"}
SIZES = [numba.types.int64] * 4  # what follows the words of neurons, where values are found and columns added
FOUND = (*SIZES, ("float32", 1), ("float32", 2), numba.types.float64, ("float32", 2))
ADDED = (*SIZES, ("float32", 2), ("float32", 3))
SPQR = (("uint64", 3), ("int32", 1))
AT_ONCE = r"(ld|st)\.global\.(u64|b64|v2)"  # eight bytes a lane
SHARED_BYTES = 48 << 10  # that a thread block has without asking for more


@pytest.fixture
def of_bitmap():
    from toolkit.kernels.bitmap import cuda

    return cuda


@pytest.fixture
def of_spqr():
    from toolkit.kernels.spqr import cuda

    return cuda


@pytest.fixture
def of_neurons():
    from toolkit.kernels.neurons import cuda

    return cuda


def count(pattern, ptx):
    return len(re.findall(pattern, ptx))


def bitmap_ptx(kernel, dtype, outputs, cc):
    """The PTX of a kernel for elements of this type."""
    from numba import types

    element = {1: "uint8", 2: "uint16", 4: "uint32"}[dtype.itemsize]
    inputs = ("uint32", 2), ("int64", 1), ("int32", 2), (element, 1)
    return ptx_of(kernel, cc, *inputs, *((element if kind == "element" else kind, 2) for kind in outputs), types.int64)


@pytest.mark.parametrize(("dtype", "cc"), TARGETS, ids=str)
def test_bitmaps_are_decompressed_eight_bytes_at_once(of_bitmap, dtype, cc):
    ptx = bitmap_ptx(of_bitmap.decompress_kernel(dtype, True), dtype, ["uint64"], cc)
    assert count(r"shfl\.sync\.up", ptx) == 5
    assert "prefetch.global.L2" in ptx
    assert re.search(r"st\.global\.(u64|b64|v2)", ptx)
    assert re.search(rf"ld\.global\.({WORDS[dtype]})", ptx)
    assert "ld.global.u64" in ptx, "row offsets are 64-bit"
    if (dtype, cc) == (torch.float16, (9, 0)):
        ptx = bitmap_ptx(of_bitmap.decompress_kernel(dtype, False), dtype, ["element"], cc)
        assert not re.search(r"st\.global\.(u64|b64|v2)", ptx)


@pytest.mark.parametrize(("dtype", "cc"), TARGETS, ids=str)
def test_products_of_bitmaps(of_bitmap, dtype, cc):
    x_dtype, rows = torch.float32 if dtype == torch.float32 else torch.float16, of_bitmap.ROWS
    ptx = bitmap_ptx(of_bitmap.matvec_kernel(dtype, x_dtype, 1), dtype, ["uint64", "float32"], cc)
    assert count(r"fma\.rn\.f32", ptx) >= rows
    assert count(r"fma\.rn\.f32", ptx) % rows == 0
    assert count(r"shfl\.sync\.up", ptx) == count(r"shfl\.sync\.bfly", ptx) == 5 * rows
    assert "ld.global.u64" in ptx
    if dtype == torch.float16:
        assert "cvt.f32.f16" in ptx, "in one instruction"
    if (dtype, cc) == (torch.float16, (9, 0)):
        ptx = bitmap_ptx(of_bitmap.matvec_kernel(dtype, x_dtype, 16), dtype, ["uint64", "float32"], cc)
        assert count(r"fma\.rn\.f32", ptx) % (16 * rows) == 0


@pytest.mark.parametrize(("cc", "by_table", "batch"), [((8, 0), True, 1), ((8, 9), False, 1), ((9, 0), True, 16)])
def test_products_of_spqr(of_spqr, cc, by_table, batch):
    kernel = of_spqr.matvec_kernel(by_table, "csr", 16, torch.float16, batch)
    ptx = ptx_of(kernel, cc, *SPQR, ("uint32", 1), ("uint16", 2), ("float32", 2))
    assert count(r"shfl\.sync\.bfly", ptx) == 3 + batch, "a tile's statistics, and the sums at the end"
    assert count(r"fma\.rn\.f32", ptx) >= 2 * batch
    assert "ld.global.u64" in ptx, "a word as one"
    assert "ld.shared.u64" in ptx, "two activations at once"
    assert "cvt.f32.f16" in ptx, "in one instruction"
    if batch == 1:  # the loop over a word's pairs is unrolled
        assert count(r"mul\.rn\.f16x2", ptx) == 9, "scale and zero point together, then two weights at once"
        assert by_table or count(r"sub\.rn\.f16x2", ptx) == 18


def test_decoding_of_spqr_and_outliers_alone(of_spqr):
    kernel = of_spqr.decode_kernel(False, "ptcsr", 32, torch.bfloat16)
    ptx = ptx_of(kernel, (9, 0), *SPQR, ("uint64", 1), ("uint16", 2))
    assert count(r"shfl\.sync\.bfly", ptx) in (3, 6), "a tile's statistics; the loop may be there twice"
    from toolkit.kernels.csr import cuda

    kernel = cuda.add_matvec_kernel("csr", 32, torch.float32, 3)
    ptx = ptx_of(kernel, (9, 0), ("int32", 1), ("uint64", 1), ("uint32", 2), ("float32", 2))
    assert count(r"shfl\.sync\.bfly", ptx) == 3


@pytest.mark.parametrize(("cc", "batch"), [((8, 0), 1), ((8, 9), 3), ((9, 0), 16)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_neurons_are_read_eight_bytes_at_once(of_neurons, cc, batch, dtype):
    gated = dtype == torch.bfloat16
    find = of_neurons.values_kernel((dtype, 4), "silu" if gated else "relu", gated, batch)
    ptx = ptx_of(find, cc, ("uint64", 2), *FOUND)
    assert re.search(AT_ONCE, ptx)
    assert count(r"fma\.rn\.f32", ptx) >= batch * (1 + gated)
    assert count(r"shfl\.sync\.bfly", ptx) == 5 * batch * (1 + gated)
    add = of_neurons.columns_kernel((dtype, 4), gated, batch)
    ptx = ptx_of(add, cc, ("uint64", 2), *ADDED)
    assert re.search(AT_ONCE, ptx)
    assert count(r"fma\.rn\.f32", ptx) % (4 * batch) == 0
    if dtype == torch.float16:
        assert "cvt.f32.f16" in ptx, "in one instruction"


@pytest.mark.parametrize("activation", neurons.ACTIVATIONS)
def test_every_activation_compiles_without_calls(of_neurons, activation):
    find = of_neurons.values_kernel((torch.float32, 1), activation, False, 1)
    ptx_of(find, (9, 0), ("uint32", 2), *FOUND)


@pytest.mark.parametrize(("cc", "batch", "bits"), [((8, 0), 1, 4), ((8, 9), 3, 2), ((9, 0), 4, 4)])
def test_records_are_read_32_bits_at_once(of_neurons, cc, batch, bits):

    find = of_neurons.values_kernel(bits, "silu", True, batch)
    ptx = ptx_of(find, cc, ("uint32", 2), *FOUND)
    assert count(r"fma\.rn\.f32", ptx) >= 2 * batch
    assert count(r"shfl\.sync\.bfly", ptx) == 5 * batch * 2
    ptx = ptx_of(of_neurons.columns_kernel(bits, True, batch), cc, ("uint32", 2), *ADDED)
    assert count(r"fma\.rn\.f32", ptx) >= batch * 32 // bits
    assert "cvt.f32.f16" in ptx, "in one instruction"


@pytest.mark.parametrize("kind", [np.uint8, np.uint16, np.uint32])
def test_places_beyond_32_bits(of_bitmap, kind, tmp_path):
    """The kernels' address arithmetic, the same source compiled for the CPU, on a file with a hole."""
    from toolkit.kernels.engine.gpu import address, item

    place = numba.njit(of_bitmap.value_place.py_func)
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


def test_decompression_launches_a_warp_for_each_block(of_bitmap):
    for rows, columns in [(1, 1), (3, 100), (9216, 9216), (9216, 36_864), (70_000, 40), (2**31 + 9, 5000)]:
        launch = of_bitmap.decompress_launch(rows, columns)
        warps = launch.threads[1]
        assert launch.threads == (32, warps, 1)
        assert 1 <= warps <= of_bitmap.WARPS
        assert rows <= launch.grid[0] * warps < rows + warps, "none for nothing but in the last thread block"
        assert launch.grid[1] == -(-columns // 4096)
        assert launch.grid[0] < 2**31
    assert of_bitmap.decompress_launch(1, 65_535 * 4096).grid == (1, 65_535)
    with pytest.raises(ValueError, match="268431361 columns are more than a GPU's grid has room for"):
        of_bitmap.decompress_launch(1, 65_535 * 4096 + 1)


@pytest.mark.parametrize("multiprocessors", [1, 24, 132])
def test_launches_cover_all_rows_once(of_bitmap, of_spqr, of_neurons, multiprocessors):
    for rows, columns in [(1, 1), (13, 65_537), (576, 1536), (9216, 36_864), (128_256, 8192), (8192, 70_000)]:
        launch = of_bitmap.matvec_launch(rows, columns, multiprocessors)
        lanes, split, groups = launch.threads
        assert (lanes, launch.grid[1]) == (32, 1)
        assert 1 <= split * groups <= of_bitmap.WARPS
        assert split & (split - 1) == 0
        assert split <= max(1, -(-columns // 4096))
        assert rows <= launch.grid[0] * groups * of_bitmap.ROWS < rows + of_bitmap.ROWS * groups

        launch = of_spqr.matvec_launch(rows, columns, multiprocessors)
        lanes, split, tall = launch.threads
        assert lanes == 32
        assert split * tall <= of_spqr.WARPS
        assert of_spqr.WARPS % split == 0
        assert split == 1 or split <= -(-columns // 32)
        assert rows <= 16 * tall * launch.grid[0] < rows + 16 * tall
        launch = of_spqr.decode_launch(rows, columns, multiprocessors)
        assert rows <= 16 * launch.grid[0] < rows + 16
        assert launch.threads[1] <= of_spqr.WARPS
        assert 1 <= launch.grid[1] <= -(-columns // 512)

        launch = of_neurons.values_launch(rows)
        assert rows <= launch.grid[0] * launch.threads[1] < rows + launch.threads[1]
        launch = of_neurons.columns_launch(rows, columns, multiprocessors)
        assert columns <= 32 * launch.grid[0] < columns + 32
        assert 1 <= launch.grid[1] <= max(1, rows // launch.threads[1])


def test_rows_are_shared_only_where_the_gpu_would_be_idle(of_bitmap, of_spqr):
    assert of_bitmap.matvec_launch(128_256, 16_384, 132).threads == (32, 1, 4)
    assert of_bitmap.matvec_launch(64, 16_384, 132).threads == (32, 4, 1)
    assert of_bitmap.matvec_launch(64, 8192, 132).threads == (32, 2, 2)
    assert of_bitmap.matvec_launch(64, 4096, 132).threads == (32, 1, 4)
    assert of_bitmap.matvec_launch(64, 16_384, 1).threads == (32, 1, 4)
    assert of_spqr.matvec_launch(128_256, 8192, 132).threads == (32, 1, 8)
    assert of_spqr.matvec_launch(28_672, 8192, 132).threads == (32, 2, 4)
    assert of_spqr.matvec_launch(4096, 4096, 132).threads == (32, 8, 1)
    assert of_spqr.matvec_launch(4096, 64, 132).threads == (32, 2, 4)


def test_shared_memory_suffices(of_spqr, of_neurons):
    for batch in range(1, 17):
        tiles = of_spqr.tiles_at_once(batch)
        assert tiles > 0
        assert tiles % (2 * of_spqr.WARPS) == 0, "whole turns of any number of warps"
        sums = 4 * of_spqr.WARPS * 16 * batch
        assert 4 * of_spqr.TABLE + 4 * 16 * tiles * batch + sums <= SHARED_BYTES
    assert 4 * of_neurons.WARPS * of_neurons.VECTORS * 4 * 32 <= SHARED_BYTES
    assert 4 * of_neurons.WARPS * of_neurons.VECTORS_OF_RECORDS * 32 // 2 * 32 <= SHARED_BYTES


def test_without_numba_cuda_or_a_gpu_the_error_says_so(monkeypatch):
    encoded, zeros = bitmap.encode(torch.ones(2, 2)), torch.zeros(1, 1, 16, dtype=torch.int64)
    outliers = csr.no_outliers((1, 1))
    runs = (
        lambda: bitmap.decompress(encoded, backend="cuda"),
        lambda: bitmap.matvec(encoded, torch.ones(2), backend="cuda"),
        lambda: spqr.decode(zeros, outliers, backend="cuda_table"),
        lambda: csr.add_matvec(outliers, torch.ones(1), torch.ones(1), "cuda"),
    )
    monkeypatch.setenv("NUMBA_ENABLE_CUDASIM", "0")
    for library, available, words in (
        (None, False, r"needs numba-cuda: pip install -e '\.\[cuda\]'"),
        ("found", False, "needs a CUDA GPU, and torch sees none; use backend='auto'"),
        ("found", True, "works on a GPU; the tensors are on cpu: move them with"),
    ):
        monkeypatch.setattr(backends, "find_spec", lambda name, library=library: library)
        monkeypatch.setattr(torch.cuda, "is_available", lambda available=available: available)
        for run in runs:
            with pytest.raises(UserError, match=rf"backend 'cuda\w*' {words}"):
                run()


def test_numba_cuda_is_imported_only_when_used():
    code = (
        "import sys; from toolkit.kernels import bitmap, csr, spqr; bitmap.available(), spqr.available();"
        "sys.exit(any(name in sys.modules for name in ('numba.cuda', 'toolkit.kernels.engine.gpu')))"
    )
    subprocess.run([sys.executable, "-P", "-c", code], check=True, cwd=Path(__file__).parents[2])

"""The CUDA kernels compiled to PTX, without a GPU, and the sizes of their launches. `test_cuda.py` runs them."""

import re

import numba
import numpy as np
import pytest
import torch

from tests.kernels.families import needs_numba_cuda, ptx_of

pytestmark = needs_numba_cuda
TARGETS = [(8, 0), (8, 9), (9, 0)]  # no kernel has code for one kind of GPU alone: they have them in turns
# elements of all widths; bfloat16 differs from float16 in one conversion
WORDS = {torch.float32: "b32|u32|f32", torch.float16: "b16|u16", torch.int8: "b8|u8"}
ELEMENTS = {1: "uint8", 2: "uint16", 4: "uint32"}  # by width in bytes
SHARED_BYTES = 48 << 10  # that a thread block has without asking for more
WIDE_LOAD, WIDE_STORE = r"ld\.global\.(u64|b64|v2)", r"st\.global\.(u64|b64|v2)"  # eight bytes a lane
IN_ONE = r"cvt\.f32\.f16"  # fp16 to fp32 in one instruction


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


def forms(of_bitmap, of_spqr, of_neurons):
    """Each kernel in the forms that differ: the kernel, its arguments, and what its PTX must contain, by name."""
    from toolkit.kernels.csr import cuda as of_outliers

    int64, float64 = numba.types.int64, numba.types.float64
    for dtype, words in WORDS.items():
        element = ELEMENTS[dtype.itemsize]
        stored = ("uint32", 2), ("int64", 1), ("int32", 2), (element, 1)
        x_dtype = torch.float32 if dtype == torch.float32 else torch.float16
        exact = [IN_ONE] if dtype == torch.float16 else []
        decompress, multiply = of_bitmap.decompress_kernel(dtype, True), of_bitmap.matvec_kernel(dtype, x_dtype, 1)
        wide = rf"ld\.global\.({words})", WIDE_STORE, r"prefetch\.global\.L2"
        yield f"decompressed {dtype}", decompress, (*stored, ("uint64", 2), int64), wide
        yield f"bitmap {dtype}", multiply, (*stored, ("uint64", 2), ("float32", 2), int64), [WIDE_LOAD, *exact]
    spqr_words = ("uint64", 3), ("int32", 1)
    for by_table in (True, False):
        kernel = of_spqr.matvec_kernel(by_table, "csr", 16, torch.float16, 1)
        patterns = [r"ld\.global\.u64", r"ld\.shared\.u64", IN_ONE, r"mul\.rn\.f16x2"]  # two weights at once
        yield f"spqr {by_table}", kernel, (*spqr_words, ("uint32", 1), ("uint16", 2), ("float32", 2)), patterns
    kernel = of_spqr.decode_kernel(False, "ptcsr", 32, torch.bfloat16)
    yield "spqr decoded", kernel, (*spqr_words, ("uint64", 1), ("uint16", 2)), [r"ld\.global\.u64"]
    kernel = of_outliers.add_matvec_kernel("csr", 32, torch.float32, 3)
    yield "outliers", kernel, (("int32", 1), ("uint64", 1), ("uint32", 2), ("float32", 2)), []
    sizes = [int64] * 4
    found = (*sizes, ("float32", 1), ("uint8", 2), ("float32", 2), float64, ("float32", 2))
    added = (*sizes, ("float32", 2), ("float32", 3))
    for rows, words, activation, gated, batch, patterns in (
        ((torch.float16, 4), ("uint64", 2), "relu", False, 1, [WIDE_LOAD, IN_ONE]),
        ((torch.bfloat16, 4), ("uint64", 2), "silu", True, 16, [WIDE_LOAD]),
        ((torch.float32, 1), ("uint32", 2), "gelu", False, 1, []),
        (4, ("uint32", 2), "silu", True, 3, [r"ld\.global\.(u32|b32)", IN_ONE]),
    ):
        find, add = (
            of_neurons.values_kernel(rows, activation, gated, batch),
            of_neurons.columns_kernel(rows, gated, batch),
        )
        yield f"neurons found {rows}", find, (words, *found), patterns[:1]
        yield f"neurons added {rows}", add, (words, *added), patterns


def test_every_kernel_keeps_its_numbers_in_registers_and_reads_eight_bytes_at_once(of_bitmap, of_spqr, of_neurons):
    """`ptx_of` refuses arrays in memory, and calls."""
    missing = []
    for number, (name, kernel, arguments, patterns) in enumerate(forms(of_bitmap, of_spqr, of_neurons)):
        ptx = ptx_of(kernel, TARGETS[number % 3], *arguments)
        missing += [(name, pattern) for pattern in patterns if not re.search(pattern, ptx)]
    assert not missing


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


def test_shared_memory_suffices(of_spqr, of_neurons):
    for batch in range(1, 17):
        tiles = of_spqr.tiles_at_once(batch)
        assert tiles > 0
        assert tiles % (2 * of_spqr.WARPS) == 0, "whole turns of any number of warps"
        sums = 4 * of_spqr.WARPS * 16 * batch
        assert 4 * of_spqr.TABLE + 4 * 16 * tiles * batch + sums <= SHARED_BYTES
    assert 4 * of_neurons.WARPS * of_neurons.VECTORS * 4 * 32 <= SHARED_BYTES
    assert 4 * of_neurons.WARPS * of_neurons.VECTORS_OF_RECORDS * 32 // 2 * 32 <= SHARED_BYTES


def test_numpy_without_row_stack_has_it_again(monkeypatch):
    """As NumPy 2.5 has none. numba-cuda asks for it when it first compiles."""
    from toolkit.kernels.engine import gpu

    monkeypatch.delattr(np, "row_stack", raising=False)
    gpu.complete_numpy()
    assert vars(np)["row_stack"] is np.vstack

"""The CUDA kernels of SpQR: compiled to PTX (`test_cuda.py` runs them), launch sizes."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.kernels.families import needs_numba_cuda, ptx_of
from toolkit.errors import UserError
from toolkit.kernels import csr, spqr
from toolkit.kernels.runtime import backends


@pytest.fixture
def kernels():
    if not backends.find_spec("numba_cuda"):
        pytest.skip("needs numba-cuda: pip install -e '.[cuda]'")
    from toolkit.kernels.spqr import cuda

    return cuda


MATRIX = (("uint64", 3), ("int32", 1))


@needs_numba_cuda
@pytest.mark.parametrize(("cc", "by_table", "batch"), [((8, 0), True, 1), ((8, 9), False, 1), ((9, 0), True, 16)])
def test_products_compile_to_what_they_should_be(kernels, cc, by_table, batch):
    kernel = kernels.matvec_kernel(by_table, "csr", 16, torch.float16, batch)
    ptx = ptx_of(kernel, cc, *MATRIX, ("uint32", 1), ("uint16", 2), ("float32", 2))
    assert len(re.findall(r"shfl\.sync\.bfly", ptx)) == 3 + batch, "a tile's statistics, and the sums at the end"
    assert len(re.findall(r"fma\.rn\.f32", ptx)) >= 2 * batch
    assert "ld.global.u64" in ptx, "a word as one"
    assert "ld.shared.u64" in ptx, "two activations at once"
    assert "cvt.f32.f16" in ptx, "in one instruction"
    products = len(re.findall(r"mul\.rn\.f16x2", ptx))
    differences = len(re.findall(r"sub\.rn\.f16x2", ptx))
    if batch == 1:  # the loop over a word's pairs is unrolled
        assert products == 9, "scale and zero point together, then two weights at once"
        assert by_table or differences == 18


@needs_numba_cuda
def test_other_kernels_compile(kernels):
    ptx = ptx_of(
        kernels.decode_kernel(False, "ptcsr", 32, torch.bfloat16), (9, 0), *MATRIX, ("uint64", 1), ("uint16", 2)
    )
    assert len(re.findall(r"shfl\.sync\.bfly", ptx)) in (3, 6), "a tile's statistics; the loop may be there twice"
    from toolkit.kernels.csr import cuda

    kernel = cuda.add_matvec_kernel("csr", 32, torch.float32, 3)
    ptx = ptx_of(kernel, (9, 0), ("int32", 1), ("uint64", 1), ("uint32", 2), ("float32", 2))
    assert len(re.findall(r"shfl\.sync\.bfly", ptx)) == 3


@pytest.mark.parametrize("multiprocessors", [1, 24, 132])
@pytest.mark.parametrize("shape", [(1, 1), (17, 40), (576, 1536), (4096, 4096), (28_672, 8192), (8192, 70_000)])
def test_launches_cover_all_rows(kernels, shape, multiprocessors):
    rows, columns = shape
    launch = kernels.matvec_launch(rows, columns, multiprocessors)
    lanes, split, tall = launch.threads
    assert lanes == 32
    assert split * tall <= kernels.WARPS
    assert kernels.WARPS % split == 0
    assert split == 1 or split <= -(-columns // 32)
    assert rows <= 16 * tall * launch.grid[0] < rows + 16 * tall
    launch = kernels.decode_launch(rows, columns, multiprocessors)
    assert rows <= 16 * launch.grid[0] < rows + 16
    assert launch.threads[1] <= kernels.WARPS
    assert 1 <= launch.grid[1] <= -(-columns // 512)


def test_tile_rows_are_shared_only_where_the_gpu_would_be_idle(kernels):
    assert kernels.matvec_launch(128_256, 8192, 132).threads == (32, 1, 8)
    assert kernels.matvec_launch(28_672, 8192, 132).threads == (32, 2, 4)
    assert kernels.matvec_launch(4096, 4096, 132).threads == (32, 8, 1)
    assert kernels.matvec_launch(4096, 64, 132).threads == (32, 2, 4)


@pytest.mark.parametrize("batch", range(1, 17))
def test_shared_memory_suffices(kernels, batch):
    """48 KiB, which a thread block has without asking for more."""
    tiles = kernels.tiles_at_once(batch)
    assert tiles > 0
    assert tiles % (2 * kernels.WARPS) == 0, "whole turns of any number of warps"
    sums = 4 * kernels.WARPS * 16 * batch
    assert 4 * kernels.TABLE + 4 * 16 * tiles * batch + sums <= 48 << 10


def test_without_a_gpu_the_error_says_so(monkeypatch):
    words, packed = torch.zeros(1, 1, 16, dtype=torch.int64), csr.no_outliers((1, 1))
    monkeypatch.setenv("NUMBA_ENABLE_CUDASIM", "0")
    monkeypatch.setattr(backends, "find_spec", lambda name: "found")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for run in (
        lambda: spqr.decode(words, packed, backend="cuda_table"),
        lambda: spqr.matvec(words, packed, torch.ones(1), backend="cuda_table"),
        lambda: csr.add_matvec(packed, torch.ones(1), torch.ones(1), "cuda"),
    ):
        with pytest.raises(UserError, match=r"backend 'cuda\w*' needs a CUDA GPU, and torch sees none"):
            run()


def test_numba_cuda_is_imported_only_when_used():
    code = (
        "import sys; from toolkit.kernels import bitmap, csr, spqr; bitmap.available(), spqr.available();"
        "sys.exit(any(name in sys.modules for name in ('numba.cuda', 'toolkit.kernels.common.gpu')))"
    )
    subprocess.run([sys.executable, "-P", "-c", code], check=True, cwd=Path(__file__).parents[2])

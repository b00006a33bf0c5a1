"""The CUDA kernels of bundled neurons: compiled to PTX (`test_cuda.py` runs them)."""

import re

import pytest
import torch

from tests.kernels.families import ptx_of
from toolkit.kernels import neurons
from toolkit.kernels.runtime import backends


@pytest.fixture
def kernels():
    if not backends.find_spec("numba_cuda"):
        pytest.skip("needs numba-cuda: pip install -e '.[cuda]'")
    from toolkit.kernels.neurons import cuda

    return cuda


@pytest.mark.parametrize(("cc", "batch"), [((8, 0), 1), ((8, 9), 3), ((9, 0), 16)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_kernels_compile_to_what_they_should_be(kernels, cc, batch, dtype):
    gated = dtype == torch.bfloat16
    find = kernels.values_kernel(dtype, 4, "silu" if gated else "relu", gated, batch)
    ptx = ptx_of(find, cc, ("uint64", 2), ("float32", 1), ("float32", 2), float64(), ("float32", 2))
    assert re.search(r"ld\.global\.(u64|b64|v2)", ptx), "eight bytes a lane, as one"
    assert len(re.findall(r"fma\.rn\.f32", ptx)) >= 4 * batch * (1 + gated)
    assert len(re.findall(r"shfl\.sync\.bfly", ptx)) == 5 * batch * (1 + gated)
    ptx = ptx_of(kernels.columns_kernel(dtype, 4, batch), cc, ("uint64", 2), ("float32", 2), ("float32", 3))
    assert re.search(r"ld\.global\.(u64|b64|v2)", ptx)
    assert len(re.findall(r"fma\.rn\.f32", ptx)) % (4 * batch) == 0
    if dtype == torch.float16:
        assert "cvt.f32.f16" in ptx, "in one instruction"


@pytest.mark.parametrize("activation", neurons.ACTIVATIONS)
def test_every_activation_compiles_without_calls(kernels, activation):
    find = kernels.values_kernel(torch.float32, 1, activation, False, 1)
    ptx_of(find, (9, 0), ("uint32", 2), ("float32", 1), ("float32", 2), float64(), ("float32", 2))


def float64():
    """The type of the threshold."""
    from numba import types

    return types.float64


@pytest.mark.parametrize("multiprocessors", [1, 132])
@pytest.mark.parametrize(("rows", "words"), [(1, 1), (200, 144), (4000, 1024), (16_384, 4096)])
def test_launches_cover_all_neurons_and_columns(kernels, rows, words, multiprocessors):
    launch = kernels.values_launch(rows)
    assert rows <= launch.grid[0] * launch.threads[1] < rows + launch.threads[1]
    launch = kernels.columns_launch(rows, words, multiprocessors)
    assert words <= 32 * launch.grid[0] < words + 32
    assert 1 <= launch.grid[1] <= max(1, rows // launch.threads[1])


@pytest.mark.parametrize("at_once", [2, 4])
def test_shared_memory_suffices(kernels, at_once):
    """48 KiB, which a thread block has without asking for more."""
    assert 4 * kernels.WARPS * kernels.VECTORS * at_once * 32 <= 48 << 10

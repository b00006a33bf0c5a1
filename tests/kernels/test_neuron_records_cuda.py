"""The CUDA kernels of quantised neurons: compiled to PTX (`test_cuda.py` runs them)."""

import re

import pytest

from tests.kernels.families import ptx_of
from toolkit.kernels.runtime import backends


@pytest.fixture
def kernels():
    if not backends.find_spec("numba_cuda"):
        pytest.skip("needs numba-cuda: pip install -e '.[cuda]'")
    from toolkit.kernels.neurons import cuda_records

    return cuda_records


@pytest.mark.parametrize(("cc", "batch", "bits"), [((8, 0), 1, 4), ((8, 9), 3, 2), ((9, 0), 4, 4)])
def test_kernels_compile_to_what_they_should_be(kernels, cc, batch, bits):
    from numba import types

    sizes = [types.int64] * 3
    find = kernels.values_kernel(bits, "silu", batch)
    ptx = ptx_of(find, cc, ("uint32", 2), *sizes, ("float32", 2), types.float64, ("float32", 2))
    assert len(re.findall(r"fma\.rn\.f32", ptx)) >= 2 * batch * 32 // bits
    assert len(re.findall(r"shfl\.sync\.bfly", ptx)) == 5 * batch * 2
    ptx = ptx_of(kernels.columns_kernel(bits, batch), cc, ("uint32", 2), *sizes, ("float32", 2), ("float32", 3))
    assert len(re.findall(r"fma\.rn\.f32", ptx)) >= batch * 32 // bits
    assert "cvt.f32.f16" in ptx, "in one instruction"


@pytest.mark.parametrize("bits", [4, 2])
def test_shared_memory_suffices(kernels, bits):
    """48 KiB, which a thread block has without asking for more."""
    assert 4 * kernels.WARPS * kernels.VECTORS * 32 // bits * 32 <= 48 << 10

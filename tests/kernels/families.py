"""What the tests of several kernel families share."""

import re

import pytest

from toolkit.kernels.runtime import backends

needs_numba_cuda = pytest.mark.skipif(
    not backends.find_spec("numba_cuda"), reason="needs numba-cuda: pip install -e '.[cuda]'"
)


def ptx_of(kernel, cc, *arguments):
    """The PTX, made without a GPU, of a kernel for arrays, each given by its element and dimensions, and numbers."""
    from numba import cuda, types

    kinds = (
        types.Array(getattr(types, kind[0]), kind[1], "C") if isinstance(kind, tuple) else kind for kind in arguments
    )
    ptx, _ = cuda.compile_ptx(kernel.py_func, types.void(*kinds), cc=cc)
    assert f".target sm_{cc[0]}{cc[1]}" in ptx
    assert not re.search(r"\.local|\bcall\b", ptx), "arrays in memory that should be in registers, or calls"
    return ptx


def each_backend(family):
    """The fixture `backend`: every backend of a family in turn. Those that this CPU cannot run are skipped."""

    @pytest.fixture(params=family.BACKENDS)
    def backend(request):
        if request.param not in family.available():
            pytest.skip(f"this CPU lacks what {request.param} needs")
        return request.param

    return backend

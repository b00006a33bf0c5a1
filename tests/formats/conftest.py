import numpy as np
import pytest
import torch
from hypothesis import strategies as st

from toolkit.formats import FORMATS

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.int8)


def random_bits(draw, dtype, rows, columns):
    """Bits of elements: NaN payloads, infinities, subnormals and −0.0 all occur; any sparsity."""
    rng, width = np.random.default_rng(draw(st.integers(0, 2**32))), 8 * dtype.itemsize
    kind = np.dtype(f"uint{width}").type
    found = rng.integers(0, np.iinfo(kind).max, (rows, columns), kind, endpoint=True)
    if dtype.is_floating_point:
        found[rng.random((rows, columns)) < draw(st.sampled_from([0, 0.3]))] = 1 << width - 1
    found[rng.random((rows, columns)) < draw(st.sampled_from([0, 0.5, 0.97, 1]))] = 0
    return found


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request):
    return request.param


@pytest.fixture(params=FORMATS)
def name(request):
    return request.param


@pytest.fixture
def matrix(dtype):
    """Small, and 2:4, so that every format holds it."""
    rows = [[1, 0, 0, 2, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0, 0, 0], [0, 3, 0, 0, 5, 6, 0, 0], [0, 0, -7, 8, 0, 9, 0, 0]]
    return torch.tensor(rows, dtype=dtype)

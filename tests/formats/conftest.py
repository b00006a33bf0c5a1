import pytest
import torch

from toolkit.formats import FORMATS

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.int8)


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

"""Attention of many tokens at once against plain softmax in float64."""

import numpy as np
import pytest
import torch

from tests import naive_attention as naive
from tests.kernels.families import random
from toolkit.kernels.attention import KEYS, QUERIES, prompt_attention, tiles_of
from toolkit.kernels.engine import parallel
from toolkit.kernels.engine.tensors import FLOAT_BITS

CASES = [  # vectors, heads, key heads, positions seen by the first vector, size of a head, window
    (1, 1, 1, 1, 2, 0),
    (40, 6, 2, 1, 128, 0),
    (40, 4, 2, 90, 64, 0),
    (33, 3, 3, 200, 20, 0),
    (50, 8, 1, 30, 16, 7),
    (150, 1, 1, 300, 24, KEYS + 9),
    (5, QUERIES + 2, 1, 70, 4, 0),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_attention_of_many_vectors(case, dtype):
    vectors, heads, groups, length, size, window = case
    query = random(vectors, heads, size) * 3
    keys, values = (random(groups, length + vectors + 4, size, seed=part).to(dtype) for part in (1, 2))
    keys[:, length + vectors - 1 :] = values[:, length + vectors - 1 :] = torch.nan  # nothing is there yet
    sinks = random(heads, seed=3) if window else torch.empty(0)
    start, out = 1 if length > 5 else 0, np.full((vectors, heads, size), np.nan, np.float32)
    stored = (each.view(FLOAT_BITS[dtype]).numpy() for each in (keys, values))
    span, scale = np.array([start, length]), np.float32(naive.SCALE)
    given = query.numpy(), *stored, span, window, scale, sinks.numpy(), out
    parallel.Task(prompt_attention(dtype), given, tiles_of(vectors, heads, groups) * groups, 1 << 20)()
    wanted = naive.attention(query, keys, values, start, length, window, sinks)
    torch.testing.assert_close(torch.from_numpy(out).double(), wanted, rtol=1e-5, atol=1e-5)

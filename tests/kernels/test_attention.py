"""Attention of single vectors and of many at once, to keys and values of every type, against softmax in float64."""

import gguf
import numpy as np
import pytest
import torch

from tests import naive_attention as naive
from tests.kernels.families import random
from toolkit.kernels import eight_bit_cache, single_token
from toolkit.kernels.attention import KEYS, QUERIES, prompt_attention, tiles_of
from toolkit.kernels.eight_bit_cache import Q8_0
from toolkit.kernels.engine import parallel
from toolkit.kernels.engine.tensors import FLOAT_BITS

TYPE = gguf.GGMLQuantizationType.Q8_0
NO_SCALE = np.frombuffer(np.float16(np.nan).tobytes(), np.uint8)
CASES = [  # vectors, heads, key heads, positions seen by the first vector, size of a head, window
    (1, 1, 1, 1, 2, 0),
    (1, 6, 3, 40, 96, 7),
    (1, 8, 1, 300, 64, 0),
    (2, 5, 5, 3, 7, 0),
    (6, 4, 2, 9, 8, 4),
    (40, 6, 2, 1, 128, 0),
    (40, 4, 2, 90, 64, 0),
    (33, 3, 3, 200, 20, 0),
    (50, 8, 1, 30, 16, 7),
    (150, 1, 1, 300, 24, KEYS + 9),
    (5, QUERIES + 2, 1, 70, 4, 0),
]


def stored(kind, rows, end):
    """A cache's memory that holds rows [key heads, positions, size] up to an end, and what it decodes to."""
    if kind == Q8_0:
        blocks = gguf.quantize(rows.numpy(), TYPE)
        blocks.reshape(*blocks.shape[:2], -1, 34)[:, end:, :, :2] = NO_SCALE
        return blocks, torch.from_numpy(gguf.dequantize(blocks, TYPE))
    rows = rows.to(kind)
    rows[:, end:] = torch.nan
    return rows.view(FLOAT_BITS[kind]).numpy(), rows


@pytest.mark.parametrize("many", [False, True], ids=["vector by vector", "many at once"])
@pytest.mark.parametrize("kind", [torch.float32, torch.float16, torch.bfloat16, Q8_0], ids=str)
def test_attention(kind, many, monkeypatch):
    monkeypatch.setattr(parallel, "ROWS_WORTH_BYTES", 1)  # shared by threads, however short
    function = eight_bit_cache.attention if kind == Q8_0 else single_token.attention(kind)
    for vectors, heads, groups, length, size, window in CASES:
        size = -(-size // 32) * 32 if kind == Q8_0 else size
        query, sinks = random(vectors, heads, size) * 3, random(heads, seed=3) if window else torch.empty(0)
        end = length + vectors - 1  # nothing is there yet
        rows = (random(groups, end + 5, size, seed=part) for part in (1, 2))
        (keys, decoded_keys), (values, decoded_values) = (stored(kind, some, end) for some in rows)
        start, out = 1 if length > 5 else 0, np.full((vectors, heads, size), np.nan, np.float32)
        span, scale = np.array([start, length]), np.float32(naive.SCALE)
        given = query.numpy(), keys, values, span, window, scale, sinks.numpy(), out
        if many:
            task = parallel.Task(prompt_attention(kind), given, tiles_of(vectors, heads, groups) * groups, 1 << 20)
        else:
            task = parallel.Task(function, given, vectors * groups, 1 << 20)
        task()
        wanted = naive.attention(query, decoded_keys, decoded_values, start, length, window, sinks)
        torch.testing.assert_close(torch.from_numpy(out).double(), wanted, rtol=1e-5, atol=1e-5)

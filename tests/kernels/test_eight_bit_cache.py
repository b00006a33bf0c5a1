"""Keys and values in ggml's blocks q8_0: the package gguf's rule, and softmax in float64 over what it decodes."""

import gguf
import numpy as np
import pytest
import torch

from tests import naive_attention as naive
from tests.kernels.families import random
from toolkit.kernels import eight_bit_cache
from toolkit.kernels.attention import prompt_attention, tiles_of
from toolkit.kernels.eight_bit_cache import Q8_0
from toolkit.kernels.engine import parallel

TYPE = gguf.GGMLQuantizationType.Q8_0
CASES = [  # vectors, heads, key heads, positions seen by the first vector, size of a head, window
    (1, 1, 1, 1, 32, 0),
    (1, 6, 2, 9, 128, 0),
    (1, 8, 1, 300, 64, 0),
    (1, 6, 3, 40, 96, 7),
    (2, 5, 5, 3, 32, 0),
    (40, 6, 2, 90, 64, 0),
    (33, 8, 1, 30, 32, 7),
]


def cache_of(rows):
    """The bytes of a cache [key heads, positions, bytes] that holds rows, fp32 [key heads, positions, size]."""
    return gguf.quantize(np.ascontiguousarray(rows), TYPE)


@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_attention_to_blocks(case, many, monkeypatch):
    monkeypatch.setattr(parallel, "ROWS_WORTH_BYTES", 1)  # shared by threads, however short
    vectors, heads, groups, length, size, window = case
    query = random(vectors, heads, size) * 3
    keys, values = (cache_of(random(groups, length + vectors + 4, size, seed=part).numpy()) for part in (1, 2))
    nothing = np.frombuffer(np.float16(np.nan).tobytes(), np.uint8)
    for rows in (keys, values):  # behind the last position: scales that are no numbers
        rows.reshape(*rows.shape[:2], -1, 34)[:, length + vectors - 1 :, :, :2] = nothing
    sinks = random(heads, seed=3) if window else torch.empty(0)
    start, out = 1 if length > 5 else 0, np.full((vectors, heads, size), np.nan, np.float32)
    span, scale = np.array([start, length]), np.float32(naive.SCALE)
    given = query.numpy(), keys, values, span, window, scale, sinks.numpy(), out
    function = prompt_attention(Q8_0) if many else eight_bit_cache.attention
    rows = (tiles_of(vectors, heads, groups) if many else vectors) * groups
    parallel.Task(function, given, rows, 1 << 20)()
    decoded = (torch.from_numpy(gguf.dequantize(blocks, TYPE)) for blocks in (keys, values))
    wanted = naive.attention(query, *decoded, start, length, window, sinks)
    torch.testing.assert_close(torch.from_numpy(out).double(), wanted, rtol=1e-5, atol=1e-5)


def test_keys_and_values_become_the_blocks_of_the_package():
    pair = random(2, 3, 4, 96) * torch.tensor([1e-6, 1, 3e4]).view(1, 3, 1, 1)
    pair[0, 0, 0, 32:64], pair[0, 1, 1, 5] = 0, 1000
    keys, values = (np.zeros((4, 9, 96 // 32 * 34), np.uint8) for _ in range(2))
    eight_bit_cache.append(*pair.numpy(), np.array([0, 3]), keys, values)
    for found, given in ((keys, pair[0]), (values, pair[1])):
        wanted = cache_of(given.transpose(0, 1).numpy())
        assert np.array_equal(found[:, 2:5], wanted)
        assert not found[:, :2].any()
        assert not found[:, 5:].any()


@pytest.mark.parametrize("strange", [np.nan, np.inf])
def test_what_is_no_number_stays_none(strange):
    """It shows in the result, as it does with a cache of numbers."""
    pair = np.ones((2, 1, 1, 32), np.float32)
    pair[1, 0, 0, 7] = strange
    keys, values = np.zeros((2, 1, 1, 34), np.uint8)
    eight_bit_cache.append(*pair, np.array([0, 1]), keys, values)
    out = np.zeros((1, 1, 32), np.float32)
    seen, plain = np.array([0, 1]), np.empty(0, np.float32)
    eight_bit_cache.attention(pair[0], keys, values, seen, 0, np.float32(1), plain, out, 0, 1)
    assert not np.isfinite(out).any()


def test_an_error_is_half_a_step_of_its_block_at_most():
    row = random(1, 1, 64)
    row[0, 0, 3] = 50.0
    found = np.zeros((1, 1, 68), np.uint8)
    eight_bit_cache.append(row.numpy(), row.numpy(), np.array([0, 1]), found, found.copy())
    error = np.abs(gguf.dequantize(found, TYPE) - row.numpy()).reshape(2, 32).max(1)
    steps = np.abs(row.numpy()).reshape(2, 32).max(1) / 127
    assert (error <= 0.51 * steps).all()
    assert error[1] < 0.1 * error[0]  # a large element rounds its own block coarsely, not the other

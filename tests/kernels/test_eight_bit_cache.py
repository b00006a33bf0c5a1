"""Keys and values in ggml's blocks q8_0, by the package gguf's rule; `test_attention` attends to them."""

import gguf
import numpy as np
import pytest
import torch

from tests.kernels.families import random
from toolkit.kernels import eight_bit_cache


def test_keys_and_values_become_the_blocks_of_the_package():
    pair = random(2, 3, 4, 96) * torch.tensor([1e-6, 1, 3e4]).view(1, 3, 1, 1)
    pair[0, 0, 0, 32:64], pair[0, 1, 1, 5] = 0, 1000
    keys, values = (np.zeros((4, 9, 96 // 32 * 34), np.uint8) for _ in range(2))
    eight_bit_cache.append(*pair.numpy(), np.array([0, 3]), keys, values)
    for found, given in ((keys, pair[0]), (values, pair[1])):
        rows = np.ascontiguousarray(given.transpose(0, 1).numpy())
        assert np.array_equal(found[:, 2:5], gguf.quantize(rows, gguf.GGMLQuantizationType.Q8_0))
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

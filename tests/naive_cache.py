"""A key-value cache that rounds as the package gguf does, one key at a time, for comparison."""

import gguf
import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

Q8_0 = gguf.GGMLQuantizationType.Q8_0


def rounded(heads: Tensor) -> Tensor:
    """Each row of the last dimension as blocks of q8_0, and back."""
    blocks = gguf.quantize(heads.float().contiguous().numpy(), Q8_0)
    return torch.from_numpy(gguf.dequantize(blocks, Q8_0)).to(heads.dtype)


class RoundedCache(DynamicCache):
    """transformers' cache, whose new keys and values are rounded before anything attends to them."""

    def update(self, key_states, value_states, *more, **named):
        """Add them to a layer."""
        return super().update(rounded(key_states), rounded(value_states), *more, **named)

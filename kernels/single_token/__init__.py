"""The work of a Llama-shaped decoder on a single token beside its matrix products, in fp32.

Touvron et al., "LLaMA", 2023, section 2.2: RMSNorm, gated units, rotary embeddings, attention. Vectors are NumPy
arrays, which the functions read and write in place. They are so short that calling them is most of their cost, so only
`attend` checks what it is given.
"""

import numpy as np
import torch
from torch import Tensor

from toolkit.kernels.common.elements import FLOAT_BITS
from toolkit.kernels.runtime.threads import over_rows
from toolkit.kernels.single_token.cpu import add_and_normalise, add_to, attention, gate, normalise, rotate

__all__ = ["add_and_normalise", "add_to", "attend", "attend_stored", "bits", "gate", "normalise", "rotate"]


def attend(query: np.ndarray, keys: Tensor, values: Tensor, length: int, scale: float, out: np.ndarray) -> None:
    """Softmax attention of one query over the first `length` positions, into `out`.

    Args:
        query: fp32 [heads, size]; `heads` is a multiple of the key heads, each of which serves that many in order.
        keys, values: contiguous [key heads, positions, size] of float32, float16 or bfloat16.
        length: how many positions hold something, from 1.
        scale: what scores are multiplied by.
        out: fp32 [heads, size].

    Raises `ValueError` for shapes that do not fit each other.
    """
    heads, size = query.shape
    shape = (keys.shape[0], keys.shape[1], size)
    fits = keys.shape == values.shape == shape and out.shape == query.shape and heads % max(1, shape[0]) == 0
    if not fits or not 1 <= length <= shape[1]:
        raise ValueError(f"query {query.shape}, keys {keys.shape}, values {values.shape}, length {length}")
    attend_stored(keys.dtype, query, bits(keys), bits(values), (0, length), scale, out)


def attend_stored(
    dtype: torch.dtype,
    query: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
    span: tuple[int, int],
    scale: float,
    out: np.ndarray,
) -> None:
    """The same without its checks, for keys and values of `dtype` as `bits` gives them, over positions of a `span`."""
    read = 2 * (span[1] - span[0]) * keys.nbytes // keys.shape[1]
    over_rows(attention(dtype), len(keys), read, query, keys, values, *span, np.float32(scale), out)


def bits(tensor: Tensor) -> np.ndarray:
    """The memory of a float tensor on the CPU, as unsigned integers of its elements' width."""
    return tensor.view(FLOAT_BITS[tensor.dtype]).numpy()

"""The work of a Llama-shaped decoder on a single token beside its matrix products, in fp32.

Touvron et al., "LLaMA", 2023, section 2.2: RMSNorm, gated units, rotary embeddings, attention. Vectors are NumPy
arrays, which the functions read and write in place. They are so short that calling them is most of their cost, so
nothing is checked.
"""

from functools import cache

import numba
import numpy as np
import torch
from torch import Tensor

from toolkit.kernels.engine.compiled import compiled
from toolkit.kernels.engine.elements import FLOAT_BITS, TO_FLOAT32
from toolkit.kernels.engine.parallel import over_rows
from toolkit.kernels.neurons.shared import ACTIVATIONS

SUMS = {"reassoc", "nsz", "contract"}  # sums may run in lanes


@compiled(fastmath=SUMS)
def normalise(x, weight, epsilon, out):
    """RMSNorm of each row of x [rows, size] into `out`: x · weight / √(mean of x² + ε)."""
    size = x.shape[1]
    for row in range(len(x)):
        total = numba.float32(0)
        for i in range(size):
            total += x[row, i] * x[row, i]
        factor = numba.float32(1 / np.sqrt(total / size + epsilon))
        for i in range(size):
            out[row, i] = x[row, i] * factor * weight[i]


@compiled
def add_and_normalise(x, more, weight, epsilon, out):
    """Add `more` to `x`, both [1, size], and put the RMSNorm of the sum into `out`."""
    for i in range(x.shape[1]):
        x[0, i] += more[0, i]
    normalise(x, weight, epsilon, out)


@compiled
def add_to(x, more):
    """Add `more` to `x`, both [size], in place."""
    for i in range(x.size):
        x[i] += more[i]


@cache
def gate(activation: str):
    """The function that puts act(x) · up into `x`, both [size], from element `first` to `last`."""
    activate = ACTIVATIONS[activation]

    @compiled
    def gate(x, up, first, last):
        for i in range(first, last):
            x[i] = activate(x[i]) * up[i]

    return gate


@compiled
def rotate(x, cosine, sine):
    """Rotate each row of x [heads, size] in place: element i with element i + size / 2 by the position's angle i."""
    half = x.shape[1] // 2
    for head in range(len(x)):
        for i in range(half):
            low, high = x[head, i], x[head, half + i]
            x[head, i] = low * cosine[i] - high * sine[i]
            x[head, half + i] = high * cosine[half + i] + low * sine[half + i]


@cache
def attention(dtype: torch.dtype):
    """The function that fills the heads of `out` that the key heads `first` to `last` serve, for a cache of `dtype`.

    A head attends to the positions `start` to `end`.
    """
    to_float32 = TO_FLOAT32[dtype]

    @compiled(fastmath=SUMS)
    def attention(query, keys, values, start, end, scale, out, first, last):
        size, served = query.shape[1], len(query) // len(keys)
        shares = np.empty(end - start, np.float32)
        for head in range(first * served, last * served):
            group, highest = head // served, numba.float32(-np.inf)
            for at in range(end - start):
                score = numba.float32(0)
                for i in range(size):
                    score += query[head, i] * to_float32(keys[group, start + at, i])
                shares[at] = score * scale
                highest = max(highest, shares[at])
            total = numba.float32(0)
            for at in range(end - start):
                shares[at] = np.exp(shares[at] - highest)
                total += shares[at]
            for i in range(size):
                out[head, i] = 0
            for at in range(end - start):
                share = shares[at] / total
                for i in range(size):
                    out[head, i] += share * to_float32(values[group, start + at, i])

    return attention


def attend(
    dtype: torch.dtype,
    query: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
    span: tuple[int, int],
    scale: float,
    out: np.ndarray,
) -> None:
    """Softmax attention of one query over the positions of a `span`, into `out`.

    Args:
        dtype: of keys and values: float32, float16 or bfloat16.
        query: fp32 [heads, size]; `heads` is a multiple of the key heads, each of which serves that many in order.
        keys, values: contiguous [key heads, positions, size], as `bits` gives them.
        span: the first position and the one behind the last.
        scale: what scores are multiplied by.
        out: fp32 [heads, size].
    """
    read = 2 * (span[1] - span[0]) * keys.nbytes // keys.shape[1]
    over_rows(attention(dtype), len(keys), read, query, keys, values, *span, np.float32(scale), out)


def bits(tensor: Tensor) -> np.ndarray:
    """The memory of a float tensor on the CPU, as unsigned integers of its elements' width."""
    return tensor.view(FLOAT_BITS[tensor.dtype]).numpy()

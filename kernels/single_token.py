"""The work of a Llama-shaped decoder beside its matrix products, in fp32, on one or more tokens.

Touvron et al., "LLaMA", 2023, section 2.2: RMSNorm, gated units, rotary embeddings, attention. Vectors are NumPy
arrays, which the functions read and write in place. They are so short that calling them is most of their cost, so
nothing is checked.
"""

from functools import cache

import numba
import numpy as np

from toolkit.kernels.engine.compiled import compiled
from toolkit.kernels.engine.elements import FROM_FLOAT32, TO_FLOAT32
from toolkit.kernels.engine.exponential import IN_LANES, exp

CLAMPED = "clamped"  # the activation of gpt-oss, whose factors are the next two
ALPHA, LIMIT = np.float32(1.702), np.float32(7)
NO_SINKS = np.empty(0, np.float32)
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
    """Add `more` to `x`, both [vectors, size], and put the RMSNorm of each sum into `out`."""
    for vector in range(len(x)):
        for i in range(x.shape[1]):
            x[vector, i] += more[vector, i]
    normalise(x, weight, epsilon, out)


@compiled
def add_to(x, more):
    """Add `more` [size] to each vector of x [vectors, size], in place."""
    for vector in range(len(x)):
        for i in range(more.size):
            x[vector, i] += more[i]


@cache
def gate(activation: str):
    """The function that puts act(x) · up into `x`, both of one size, from element `first` to `last`."""
    if activation == CLAMPED:
        return clamped_gate
    activate = IN_LANES[activation]

    @compiled
    def gate(x, up, first, last):
        # indices from 0 on, which LLVM knows not to be negative
        some, by = x.reshape(x.size)[first:last], up.reshape(up.size)[first:last]
        for i in range(some.size):
            some[i] = activate(some[i]) * by[i]

    return gate


@compiled
def clamped_gate(x, up, first, last):
    """The gate of gpt-oss's experts: (up + 1) · x · sigmoid(1.702 x), with x up to 7 and up from -7 to 7."""
    some, by = x.reshape(x.size)[first:last], up.reshape(up.size)[first:last]
    for i in range(some.size):
        given, factor = min(some[i], LIMIT), max(min(by[i], LIMIT), -LIMIT)
        some[i] = given / (numba.float32(1) + exp(-ALPHA * given)) * (factor + numba.float32(1))


@compiled
def rotate(x, cosine, sine):
    """Rotate x [vectors, heads, size] in place by the angles of each position, [vectors, size].

    Element i of a head rotates with element i + size / 2, by angle i.
    """
    half = x.shape[2] // 2
    for vector in range(len(x)):
        for head in range(x.shape[1]):
            for i in range(half):
                low, high = x[vector, head, i], x[vector, head, half + i]
                x[vector, head, i] = low * cosine[vector, i] - high * sine[vector, i]
                x[vector, head, half + i] = high * cosine[vector, half + i] + low * sine[vector, half + i]


@compiled
def part_pairs(x):
    """Put the second of each two neighbours of x [vectors, heads, size] half a head behind the first, in place.

    Files that llama.cpp wrote have the elements that rotate together side by side.
    """
    half = x.shape[2] // 2
    seconds = np.empty(half, np.float32)
    for vector in range(len(x)):
        for head in range(x.shape[1]):
            for i in range(half):
                x[vector, head, i], seconds[i] = x[vector, head, 2 * i], x[vector, head, 2 * i + 1]
            x[vector, head, half:] = seconds


@cache
def append(dtype: object):
    """The function that writes keys and values [vectors, key heads, size] into a cache of `dtype`.

    The cache is as `attention` takes it; the first of them goes to the position before `span[1]`.
    """
    from_float32 = FROM_FLOAT32[dtype]

    @compiled
    def append(key, value, span, keys, values):
        for vector in range(len(key)):
            at = span[1] - 1 + vector
            for head in range(key.shape[1]):
                for i in range(key.shape[2]):
                    keys[head, at, i] = from_float32(key[vector, head, i])
                    values[head, at, i] = from_float32(value[vector, head, i])

    return append


@cache
def attention(dtype: object):
    """The function of softmax attention to a cache of `dtype`, for rows `first` to `last`.

    It takes query and out, fp32 [vectors, heads, size]; keys and values [key heads, positions, size], as the bits of
    their elements; the span [2]; window, 0 for none; the scale of scores; and sinks. Each key head serves as many
    heads, in order. A row is a vector and a key head: the heads of `out` that it serves are filled. The first vector
    attends to the positions from `span[0]` up to, not including, `span[1]`, and each further vector to one more; but
    to no more than the last `window` of them. `sinks` are a score of each head for no position at all (Xiao et al.,
    "Efficient Streaming Language Models with Attention Sinks", 2024), or empty.
    """
    to_float32 = TO_FLOAT32[dtype]

    @compiled(fastmath=SUMS)
    def attention(query, keys, values, span, window, scale, sinks, out, first, last):
        size, served = query.shape[2], query.shape[1] // len(keys)
        element = np.empty(size, np.float32)
        for row in range(first, last):
            vector, group = row // len(keys), row % len(keys)
            end = span[1] + vector
            start = max(span[0], end - window) if window else span[0]
            shares = np.empty((served, end - start), np.float32)
            for at in range(end - start):
                for i in range(size):
                    element[i] = to_float32(keys[group, start + at, i])
                for head in range(served):
                    score = numba.float32(0)
                    for i in range(size):
                        score += query[vector, group * served + head, i] * element[i]
                    shares[head, at] = score * scale
            for head in range(served):
                highest, total = numba.float32(-np.inf), numba.float32(0)
                if sinks.size:
                    highest = sinks[group * served + head]
                for at in range(end - start):
                    highest = max(highest, shares[head, at])
                if sinks.size:
                    total = exp(sinks[group * served + head] - highest)
                for at in range(end - start):
                    shares[head, at] = exp(shares[head, at] - highest)
                    total += shares[head, at]
                for at in range(end - start):
                    shares[head, at] = shares[head, at] / total
                for i in range(size):
                    out[vector, group * served + head, i] = 0
            for at in range(end - start):
                for i in range(size):
                    element[i] = to_float32(values[group, start + at, i])
                for head in range(served):
                    share = shares[head, at]
                    for i in range(size):
                        out[vector, group * served + head, i] += share * element[i]

    return attention

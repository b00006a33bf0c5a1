"""A key-value cache in 8 bits. Its rows are ggml's blocks of type q8_0: 32 codes behind a scale in fp16.

A row is the key or the value of one position and head. So tokens are added one by one, and a cache can be cut anywhere.
A scale for 32 elements, as in llama.cpp, takes half a bit an element. It confines the few large elements that keys have
to their own block; with one scale for a head all others would be rounded more coarsely.

Attention reads the codes where they lie. Some rows at a time are decoded into a buffer of a few kilobytes, which all
heads use that share these keys.
"""

import numba
import numpy as np

from toolkit.kernels.blocks.activations import NARROW, STEPS, magnitude_bits, round_lanes
from toolkit.kernels.engine.compiled import compiled
from toolkit.kernels.engine.elements import as_float32, float16_bits, float32_from_float16
from toolkit.kernels.engine.exponential import exp
from toolkit.kernels.engine.simd import LANES_TO_FLOAT32, fma, item, load, splat, store, total, zeros
from toolkit.kernels.single_token import SUMS

Q8_0 = "q8_0"  # the type's name, where others are "float32" or "bfloat16"
SCALE_BYTES = 2
BLOCK_BYTES = SCALE_BYTES + NARROW
TOGETHER = 4  # positions: what is read of a query, or written of a sum, serves all of them
LANES = 16
TO_FLOATS = LANES_TO_FLOAT32["int8"]


@compiled
def append(key, value, span, keys, values):
    """Round keys and values, fp32 [vectors, key heads, size], into a cache [key heads, positions, bytes].

    The first of them goes to the position before `span[1]`. Codes that lie between two integers become the even one.
    """
    for vector in range(len(key)):
        at = span[1] - 1 + vector
        for head in range(key.shape[1]):
            row = vector * key.shape[1] + head
            encode(key, row * key.shape[2], key.shape[2], keys[head, at])
            encode(value, row * key.shape[2], key.shape[2], values[head, at])


@compiled
def encode(x, first, size, row):
    """Round `size` elements of x, fp32, from `first` on, as ggml's `quantize_row_q8_0` does."""
    for block in range(size // NARROW):
        at, place = first + block * NARROW, block * BLOCK_BYTES
        scale = as_float32(magnitude_bits(x, at, NARROW)) / STEPS
        bits = float16_bits(scale)
        row[place], row[place + 1] = bits & 0xFF, bits >> 8
        factor = numba.float32(1) / scale if scale > 0 else numba.float32(0)
        round_lanes(x, at, factor, row, place + SCALE_BYTES, NARROW)


@compiled(forceinline=True)
def decode(rows, at, size, out, place):
    """Write the row whose bytes begin at `at` as `size` fp32 numbers, from `place` on."""
    nothing = zeros(NARROW)
    for _ in range(size // NARROW):
        bits = numba.uint16(item(rows, at)) | numba.uint16(item(rows, at + 1)) << numba.uint16(8)
        scale = splat(float32_from_float16(bits), NARROW)
        store(out, place, fma(TO_FLOATS(load(rows, at + SCALE_BYTES, NARROW)), scale, nothing))
        at, place = at + BLOCK_BYTES, place + NARROW


@compiled(forceinline=True)
def decode_rows(rows, group, at, count, size, out):
    """Decode `count` rows of a head from position `at` on to the first rows of `out`."""
    positions, nbytes = rows.shape[1], rows.shape[2]
    for some in range(count):
        decode(rows, (group * positions + at + some) * nbytes, size, out, some * out.shape[1])


@compiled(forceinline=True)
def score(query, first, rows, size, scale, shares, head, at):
    """The scores of one head's query for `TOGETHER` rows, into `shares` from `at` on."""
    one, two, three, four = zeros(LANES), zeros(LANES), zeros(LANES), zeros(LANES)
    for i in range(0, size, LANES):
        by = load(query, first + i, LANES)
        one = fma(load(rows, i, LANES), by, one)
        two = fma(load(rows, size + i, LANES), by, two)
        three = fma(load(rows, 2 * size + i, LANES), by, three)
        four = fma(load(rows, 3 * size + i, LANES), by, four)
    shares[head, at] = total(one) * scale
    shares[head, at + 1] = total(two) * scale
    shares[head, at + 2] = total(three) * scale
    shares[head, at + 3] = total(four) * scale


@compiled(forceinline=True)
def add_rows(shares, head, at, rows, size, out, first):
    """Add `TOGETHER` rows by their shares to the sum of one head."""
    one, two = splat(shares[head, at], LANES), splat(shares[head, at + 1], LANES)
    three, four = splat(shares[head, at + 2], LANES), splat(shares[head, at + 3], LANES)
    for i in range(0, size, LANES):
        found = load(out, first + i, LANES)
        found = fma(load(rows, i, LANES), one, found)
        found = fma(load(rows, size + i, LANES), two, found)
        found = fma(load(rows, 2 * size + i, LANES), three, found)
        store(out, first + i, fma(load(rows, 3 * size + i, LANES), four, found))


@compiled(fastmath=SUMS)
def softmax(shares, sink, sinks):
    """Turn scores into shares, in place; `sinks`: 1 if there is a score for no position, `sink`."""
    highest, sum_of = numba.float32(-np.inf), numba.float32(0)
    if sinks:
        highest = sink
    for at in range(shares.size):
        highest = max(highest, shares[at])
    if sinks:
        sum_of = exp(sink - highest)
    for at in range(shares.size):
        shares[at] = exp(shares[at] - highest)
        sum_of += shares[at]
    for at in range(shares.size):
        shares[at] = shares[at] / sum_of


@compiled
def attention(query, keys, values, span, window, scale, sinks, out, first, last):
    """Softmax attention to such a cache, as `toolkit.kernels.single_token.attention` describes it."""
    size, served = query.shape[2], query.shape[1] // len(keys)
    some = np.zeros((TOGETHER, size), np.float32)
    for row in range(first, last):
        vector, group = row // len(keys), row % len(keys)
        head, end = group * served, span[1] + vector
        start = max(span[0], end - window) if window else span[0]
        count = end - start
        shares = np.zeros((served, (count + TOGETHER - 1) // TOGETHER * TOGETHER), np.float32)
        place = (vector * query.shape[1] + head) * size
        for at in range(0, count, TOGETHER):
            decode_rows(keys, group, start + at, min(TOGETHER, count - at), size, some)
            for each in range(served):
                score(query, place + each * size, some, size, scale, shares, each, at)
        for each in range(served):
            softmax(shares[each, :count], sinks[head + each] if sinks.size else numba.float32(0), sinks.size)
            shares[each, count:] = 0
            out[vector, head + each] = 0
        for at in range(0, count, TOGETHER):
            decode_rows(values, group, start + at, min(TOGETHER, count - at), size, some)
            for each in range(served):
                add_rows(shares, each, at, some, size, out, place + each * size)

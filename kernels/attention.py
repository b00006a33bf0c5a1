"""Attention of many tokens at once, such as those of a prompt, in fp32: some queries meet some keys at a time.

The shares of keys are never in memory as a whole (Milakov and Gimelshein, "Online normalizer calculation for softmax",
2018; Dao et al., "FlashAttention", 2022): the sums so far shrink when a higher score comes. Both products are those of
small matrices in the second cache. Scores have a query a lane, so that no sum runs across lanes.
"""

from functools import cache

import numpy as np

from toolkit.kernels import eight_bit_cache
from toolkit.kernels.engine import simd
from toolkit.kernels.engine.compiled import compiled
from toolkit.kernels.engine.elements import TO_FLOAT32
from toolkit.kernels.engine.exponential import exp
from toolkit.kernels.engine.simd import fma, item, load, splat, store

KEYS, QUERIES = 64, 128  # at once: queries of all heads that share keys
LANES = 16
WIDE = 4 * LANES if simd.has("avx512f") else LANES  # lanes of four rows at once, as many as the registers hold
NO_SCORE = np.float32(-1e30)  # of a key that a query does not see


@cache
def four_rows(lanes: int):
    """The function that adds products of four rows of `a` with `lanes` columns of `b` to those of `c`."""

    @compiled(forceinline=True)
    def four_rows(a, at, row_step, step, inner, b, c, row, column):
        size = b.shape[1]
        place = row * size + column
        one, two = load(c, place, lanes), load(c, place + size, lanes)
        three, four = load(c, place + 2 * size, lanes), load(c, place + 3 * size, lanes)
        for k in range(inner):
            by = load(b, k * size + column, lanes)
            one = fma(splat(item(a, at), lanes), by, one)
            two = fma(splat(item(a, at + row_step), lanes), by, two)
            three = fma(splat(item(a, at + 2 * row_step), lanes), by, three)
            four = fma(splat(item(a, at + 3 * row_step), lanes), by, four)
            at += step
        store(c, place, one)
        store(c, place + size, two)
        store(c, place + 2 * size, three)
        store(c, place + 3 * size, four)

    return four_rows


OF_WIDE, OF_LANES = four_rows(WIDE), four_rows(LANES)


@compiled
def add_product(a, row_step, step, rows, inner, b, c):
    """Add Σ a.flat[row · row_step + k · step] · b[k, column] over k below `inner` to each `c[row, column]`.

    The columns of b and c, both contiguous, are a multiple of `LANES`.
    """
    size, fours = b.shape[1], rows // 4 * 4
    whole = size // WIDE * WIDE
    for row in range(0, fours, 4):
        for column in range(0, whole, WIDE):
            OF_WIDE(a, row * row_step, row_step, step, inner, b, c, row, column)
        for column in range(whole, size, LANES):
            OF_LANES(a, row * row_step, row_step, step, inner, b, c, row, column)
    for row in range(fours, rows):
        for k in range(inner):
            factor = item(a, row * row_step + k * step)
            for column in range(size):
                c[row, column] += factor * b[k, column]


@compiled
def share_out(scores, count, highest, total, factor):
    """Turn the scores of some keys, [keys, queries], into shares by the highest ones so far, and add them to `total`.

    Sums so far are to be multiplied with `factor`.
    """
    for query in range(highest.size):
        factor[query] = highest[query]
    for key in range(count):
        for query in range(highest.size):
            highest[query] = max(highest[query], scores[key, query])
    for query in range(highest.size):
        factor[query] = exp(factor[query] - highest[query])
        total[query] *= factor[query]
    for key in range(count):
        for query in range(highest.size):
            score = scores[key, query]
            share = exp(score - highest[query])
            share = share if score > NO_SCORE else np.float32(0)
            scores[key, query] = share
            total[query] += share


@compiled
def hide(scores, first, count, begin, vectors, served, span, window):
    """Give no score to the keys, `count` from position `first` on, that a vector does not attend to."""
    for vector in range(vectors):
        end = span[1] + begin + vector
        start = max(span[0], end - window) if window else span[0]
        for key in range(count):
            if not start <= first + key < end:
                for query in range(vector * served, (vector + 1) * served):
                    scores[key, query] = NO_SCORE


def tiles_of(vectors: int, heads: int, key_heads: int) -> int:
    """How many stretches of vectors there are for each key head."""
    return -(-vectors // max(1, QUERIES // (heads // key_heads)))


@cache
def decoding(dtype: object):
    """The function that writes `count` rows of a cache of `dtype`, of one head from position `at` on, into `out`."""
    if dtype == eight_bit_cache.Q8_0:
        return eight_bit_cache.decode_rows
    to_float32 = TO_FLOAT32[dtype]

    @compiled(forceinline=True)
    def decode_rows(rows, group, at, count, size, out):
        for row in range(count):
            for i in range(size):
                out[row, i] = to_float32(rows[group, at + row, i])

    return decode_rows


@cache
def prompt_attention(dtype: object):
    """The function of `toolkit.kernels.single_token.attention` for many vectors, for rows `first` to `last`.

    It takes the same arguments, but rows are `tiles_of(vectors, heads, key heads)` for each key head. `dtype` may be
    that of `toolkit.kernels.eight_bit_cache`, too.
    """
    decode_rows = decoding(dtype)

    @compiled
    def prompt_attention(query, keys, values, span, window, scale, sinks, out, first, last):
        vectors, size, groups = len(query), query.shape[2], len(keys)
        served = query.shape[1] // groups
        at_once = max(1, QUERIES // served)
        tiles = (vectors + at_once - 1) // at_once
        columns, wide = (at_once * served + LANES - 1) // LANES * LANES, (size + LANES - 1) // LANES * LANES
        turned, scores = np.zeros((size, columns), np.float32), np.empty((KEYS, columns), np.float32)
        some_keys, some_values = np.empty((KEYS, size), np.float32), np.zeros((KEYS, wide), np.float32)
        sums, numbers = np.empty((columns, wide), np.float32), np.empty((3, columns), np.float32)
        highest, total, factor = numbers[0], numbers[1], numbers[2]
        for row in range(first, last):
            begin, group = (tiles - 1 - row // groups) * at_once, row % groups  # the longest ones first
            some = min(at_once, vectors - begin)
            for vector in range(some):
                for head in range(served):
                    for i in range(size):
                        turned[i, vector * served + head] = query[begin + vector, group * served + head, i] * scale
            highest[:], total[:], sums[:] = NO_SCORE, 0, 0
            if sinks.size:
                for column in range(some * served):
                    highest[column], total[column] = sinks[group * served + column % served], 1
            end = span[1] + begin + some - 1
            start = max(span[0], span[1] + begin - window) if window else span[0]
            for at in range(start, end, KEYS):
                count = min(KEYS, end - at)
                decode_rows(keys, group, at, count, size, some_keys)
                decode_rows(values, group, at, count, size, some_values)
                scores[:] = 0
                add_product(some_keys, size, 1, count, size, turned, scores)
                hide(scores, at, count, begin, some, served, span, window)
                share_out(scores, count, highest, total, factor)
                for column in range(columns):
                    for i in range(wide):
                        sums[column, i] *= factor[column]
                add_product(scores, 1, columns, some * served, count, some_values, sums)
            for vector in range(some):
                for head in range(served):
                    column = vector * served + head
                    for i in range(size):
                        out[begin + vector, group * served + head, i] = sums[column, i] / total[column]

    return prompt_attention

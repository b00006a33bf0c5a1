"""The kernels of SpQR's dense part for any CPU: plain loops over words.

Each function works on the tile rows `first` to `last`, and releases the GIL. Words are unsigned, [tall, wide, 16].
"""

from functools import cache

import numba
import numpy as np
import torch

from toolkit.kernels.csr import cpu as csr
from toolkit.kernels.engine.compiled import compiled
from toolkit.kernels.engine.elements import FROM_FLOAT32, float32_from_float16
from toolkit.kernels.spqr.shared import LEVELS, SECOND_ORDER, TILE, WEIGHTS, ZERO, code, dequantise


@numba.njit(inline="always")
def statistic(words, tall, wide, number):
    """One of the four second-order statistics of a tile: rows 4·number and 4·number + 2 carry its bytes."""
    low = words[tall, wide, 4 * number] >> numba.uint64(SECOND_ORDER)
    high = words[tall, wide, 4 * number + 2] >> numba.uint64(SECOND_ORDER)
    return float32_from_float16(
        numba.uint16((low & numba.uint64(0xFF)) | (high & numba.uint64(0xFF)) << numba.uint64(8))
    )


@cache
def decode_stripe(by_table: bool):
    """The function that decodes one tile row into `dense` [16, 16 · wide].

    A row of a tile has eight possible weights. `by_table` computes them first, and then looks each weight up; else
    each weight is converted by itself (thesis, section 3.2).
    """

    @compiled
    def decode_stripe(words, tall, dense):
        table = np.empty(LEVELS, np.float32)
        for wide in range(words.shape[1]):
            scale_scale, zero_scale = statistic(words, tall, wide, 0), statistic(words, tall, wide, 1)
            scale_zero, zero_zero = statistic(words, tall, wide, 2), statistic(words, tall, wide, 3)
            for row in range(TILE):
                word = words[tall, wide, row]
                scale = dequantise(code(word, 0), scale_scale, scale_zero)
                zero = dequantise(code(word, ZERO), zero_scale, zero_zero)
                if by_table:
                    for level in range(LEVELS):
                        table[level] = dequantise(level, scale, zero)
                for column in range(TILE):
                    level = code(word, WEIGHTS + 3 * column)
                    weight = table[level] if by_table else dequantise(level, scale, zero)
                    dense[row, TILE * wide + column] = weight

    return decode_stripe


@compiled
def arrange(x, order, padded):
    """Put `x[order[i]]` into `padded[0, i]`. A place outside of `x`, which a damaged file may name, gives its end."""
    for i in range(len(order)):
        padded[0, i] = x[min(max(order[i], 0), x.size - 1)]


@compiled
def pad(x, padded):
    """Copy `x` to the front of `padded[0]`."""
    for i in range(x.size):
        padded[0, i] = x[i]


@cache
def product(decode, dense_product, storage: str, bits: int):
    """The compiled function that decodes tile rows, outliers included, and sets `y[vector, row]` to their products.

    `x` is fp32 and padded. A tile row is decoded once for all vectors, and multiplied as dense matrices of fp32 are.
    """
    add_outliers, multiply = csr.add_weights(storage, bits), dense_product(torch.float32)

    @compiled
    def product(words, offsets, col_vals, x, y, first, last):
        dense = np.empty((TILE, x.shape[1]), np.float32)
        sums = np.empty((len(x), TILE), np.float32)
        for tall in range(first, last):
            rows = min(TILE, y.shape[1] - TILE * tall)
            decode(words, tall, dense)
            add_outliers(offsets, col_vals, tall, rows, dense)
            multiply(dense.view(np.uint32), x, sums, 0, TILE)
            for vector in range(len(x)):
                for row in range(rows):
                    y[vector, TILE * tall + row] = sums[vector, row]

    return product


@cache
def decoded(decode, storage: str, bits: int, dtype: torch.dtype, ordered: bool):
    """The compiled function that decodes tile rows, outliers included, into `out`, which holds the bits of `dtype`.

    If `ordered`, column `c` of `out` is column `places[c]` of the words; else both orders are the same.
    """
    add_outliers, to_bits = csr.add_weights(storage, bits), FROM_FLOAT32[dtype]

    @compiled
    def decoded(words, offsets, col_vals, places, out, first, last):
        dense = np.empty((TILE, TILE * words.shape[1]), np.float32)
        for tall in range(first, last):
            rows = min(TILE, len(out) - TILE * tall)
            decode(words, tall, dense)
            add_outliers(offsets, col_vals, tall, rows, dense)
            for row in range(rows):
                for column in range(out.shape[1]):
                    source = places[column] if ordered else numba.uint32(column)
                    out[TILE * tall + row, column] = to_bits(dense[row, source])

    return decoded

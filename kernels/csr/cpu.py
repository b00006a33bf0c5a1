"""Outliers for any CPU: plain loops over the words of one block of 16 rows, which other kernels call."""

from functools import cache

import numba

from toolkit.kernels.csr.shared import column, span, value
from toolkit.kernels.engine.compiled import compiled


@cache
def add_product(storage: str, bits: int):
    """The function that adds a block's outliers, times `x[vector]`, to `sums` [16]; `bits` tell a word's column."""
    where = span(storage)

    @compiled
    def add_product(offsets, words, block, rows, x, vector, sums):
        for row in range(rows):
            first, end, step = where(offsets, block, row, len(words))
            total = numba.float32(0)
            for at in range(first, end, step):
                found = column(words[at], bits)
                if found < x.shape[1]:
                    total += value(words[at], bits) * x[vector, found]
            sums[row] += total

    return add_product


@cache
def add_weights(storage: str, bits: int):
    """The function that adds a block's outliers to the dense rows `dense` [16, columns], in fp32."""
    where = span(storage)

    @compiled
    def add_weights(offsets, words, block, rows, dense):
        for row in range(rows):
            first, end, step = where(offsets, block, row, len(words))
            for at in range(first, end, step):
                found = column(words[at], bits)
                if found < dense.shape[1] and words[at] != 0:  # padding adds nothing, not 0 to a weight of −0
                    dense[row, found] += value(words[at], bits)

    return add_weights

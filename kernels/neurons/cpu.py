"""The FFN of some neurons for any CPU: plain loops over rows that are made fp32 first."""

from functools import cache

import numba
import numpy as np
import torch

from toolkit.kernels.engine.compiled import compiled
from toolkit.kernels.engine.elements import TO_FLOAT32, float32_from_float16
from toolkit.kernels.neurons.records import BLOCK, FIELDS, HEAD_BYTES, LANES, codes_start, group_of, section_bytes
from toolkit.kernels.neurons.shared import dense_start, ffn_of_parts


@cache
def ffn(dtype: torch.dtype):
    """The function of parts for dense bundles, as `ffn_of_parts` describes it."""
    to_float32 = TO_FLOAT32[dtype]

    @numba.njit(inline="always")
    def decode(bundles, at, weights):
        for column in range(len(weights)):
            weights[column] = to_float32(bundles[at + column])

    return _ffn(decode, dense_start)


@cache
def ffn_of_records(bits: int):
    """The function of parts for records of quantised neurons."""
    group, number_bytes, mask = group_of(bits), FIELDS * bits // 8, (1 << bits) - 1

    @numba.njit(inline="always")
    def half(numbers, at):
        return float32_from_float16(numba.uint16(numbers[at]) | numba.uint16(numbers[at + 1]) << numba.uint16(8))

    @compiled
    def decode(numbers, at, weights):
        hidden = len(weights)
        first, codes = at + HEAD_BYTES, at + codes_start(hidden, bits)
        count = hidden // group
        scale_step, scale_offset = half(numbers, at), half(numbers, at + 2)
        zero_step, zero_offset = half(numbers, at + 4), half(numbers, at + 6)
        for column in range(hidden):
            block, field, lane = column // BLOCK, column % BLOCK // LANES, column % LANES
            bit, number = field * bits, codes + (block * LANES + lane) * number_bytes
            code = numba.int32(numbers[number + bit // 8]) >> bit % 8 & mask
            scale = scale_step * numba.float32(numbers[first + column // group]) + scale_offset
            zero = zero_step * numba.float32(numbers[first + count + column // group]) + zero_offset
            weights[column] = scale * (numba.float32(code) - zero)

    return _ffn(decode, section_start(bits))


@cache
def section_start(bits: int):
    """Where in a record the sections begin, as `ffn_of_parts` asks for it."""

    @numba.njit(inline="always")
    def start(part, width, hidden):
        return part * section_bytes(hidden, bits)

    return start


def _ffn(decode, start):
    """`decode(numbers, at, weights)` gives the weights from a place in the rows on."""

    @compiled(fastmath={"reassoc", "nsz", "contract"})
    def dot(weights, x):
        total = numba.float32(0)
        for column in range(len(x)):
            total += weights[column] * x[column]
        return total

    @numba.njit(inline="always")
    def multiply(given, places, rows, x, y, place):
        numbers, weights = given
        for i in range(rows):
            decode(numbers, places[i], weights)
            for vector in range(len(x)):
                y[vector, place + i] = dot(weights, x[vector])

    @numba.njit(inline="always")
    def add_columns(given, places, values, first, rows, sums):
        numbers, weights = given
        for i in range(first, first + rows):
            decode(numbers, places[i], weights)
            for vector in range(len(sums)):
                for column in range(len(weights)):
                    sums[vector, column] += values[vector, i] * weights[column]

    @numba.njit(inline="always")
    def prepare(rows, x):
        return rows.reshape(-1), np.empty(x.shape[1], np.float32)

    return ffn_of_parts(multiply, add_columns, start, prepare)

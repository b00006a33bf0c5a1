"""The FFN of quantised neurons for CPUs with SIMD: 64 weights at a step, and each is read from memory once.

Scale and zero point of a group become a factor and an addend first, for all groups of four rows:
weight = factor · code + addend. Then the sixteen numbers of a block are widened to 32 bits. With AVX-512 a number's low
four bits pick a weight from a register, in which the sixteen weights of the group lie, so a shift and `vpermps` give
sixteen weights. 2-bit codes use the same instruction: the register holds the four weights of their group four times.
Otherwise an AND and a conversion give code · 2^p, and the factor is divided by 2^p.
"""

from functools import cache

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from toolkit.kernels.engine import simd
from toolkit.kernels.engine.compiled import compiled
from toolkit.kernels.engine.products import NEAR_BYTES, load_tile, repeat, store_rows
from toolkit.kernels.engine.simd import (
    CACHE_LINE,
    F16,
    F32,
    I8,
    I32,
    I64,
    Vector,
    call,
    constant,
    fma,
    in_all_lanes,
    multiply_add,
    prefetch,
    prefetch_l2,
    totals,
    zeros,
)
from toolkit.kernels.neurons.cpu import section_start
from toolkit.kernels.neurons.cpu_simd import adding
from toolkit.kernels.neurons.records import BLOCK, FIELDS, HEAD_BYTES, LANES, codes_start, groups, section_bytes
from toolkit.kernels.neurons.shared import ROWS, ffn_of_parts

FLOATS, INTS = ir.VectorType(F32, LANES), ir.VectorType(I32, LANES)
VECTORS = 4  # that share the weights of a row


def _linear(builder, numbers, slope, shift) -> ir.Value:
    """slope · numbers + shift."""
    return multiply_add(builder, numbers, in_all_lanes(builder, slope, LANES), in_all_lanes(builder, shift, LANES))


@intrinsic
def factors(typing_context, numbers, head, scales, zero_points):
    """The factors of sixteen groups, then their addends, given where their bytes begin."""

    def generate(context, builder, signature, arguments):
        def at(place, kind):
            source = simd.pointer(context, builder, numbers, arguments[0], place, kind)
            return builder.load(source, align=1)

        four = at(arguments[1], ir.VectorType(F16, 4))
        numbers_of = [builder.fpext(builder.extract_element(four, I32(i)), F32) for i in range(4)]
        found = []
        for place, step, offset in ((arguments[2], *numbers_of[:2]), (arguments[3], *numbers_of[2:])):
            codes = builder.zext(at(place, ir.VectorType(I8, LANES)), INTS)
            found.append(_linear(builder, builder.sitofp(codes, FLOATS), step, offset))
        scale, zero = found
        return simd.join(builder, [scale, builder.fneg(builder.fmul(scale, zero))])

    return Vector(types.float32, 2 * LANES)(numbers, types.int64, types.int64, types.int64), generate


@cache
def block_weights(bits: int, lookup: bool, rows: int = 1):
    """The intrinsic that gives the 64 weights of a block in each row, by AVX-512's look-up or without it.

    A row's block begins at `at`, at `at + stride` and so on. Its factors begin in the room at `place`, behind two
    stretches of `wide` for each row before it, and its addends `wide` further on.
    """
    levels = ir.Constant(FLOATS, [float(lane % 2**bits) for lane in range(LANES)])
    number = ir.IntType(FIELDS * bits)

    def weights(context, builder, kinds, arrays, source, place, wide):
        def of_group(place, field):
            first = simd.pointer(context, builder, kinds[1], arrays[1], place, F32)
            return builder.load(builder.gep(first, [I64(0 if bits == 4 else field)]))

        source = simd.pointer(context, builder, kinds[0], arrays[0], source, ir.VectorType(number, LANES))
        words, table = builder.zext(builder.load(source, align=1), INTS), None
        for field in range(FIELDS):
            slope, shift = of_group(place, field), of_group(builder.add(place, wide), field)
            if lookup:
                if bits == 2 or table is None:
                    table = _linear(builder, levels, slope, shift)
                places = builder.lshr(words, constant(INTS, bits * field))
                yield call(builder, "x86.avx512.permvar.sf.512", FLOATS, table, places)
            else:
                mask = constant(INTS, (2**bits - 1) << bits * field)
                codes = builder.sitofp(builder.and_(words, mask), FLOATS)
                slope = builder.fmul(slope, ir.Constant(F32, 2.0 ** -(bits * field)))
                yield _linear(builder, codes, slope, shift)

    @intrinsic
    def block_weights(typing_context, numbers, at, stride, room, place, wide):
        def generate(context, builder, signature, arguments):
            numbers_value, source, stride, room_value, place, wide = arguments
            arrays, parts = (numbers_value, room_value), []
            for _ in range(rows):
                parts += weights(context, builder, (numbers, room), arrays, source, place, wide)
                source, place = builder.add(source, stride), builder.add(builder.add(place, wide), wide)
            return simd.join(builder, parts)

        kind = Vector(types.float32, rows * BLOCK)
        return kind(numbers, types.int64, types.int64, room, types.int64, types.int64), generate

    return block_weights


@numba.njit(inline="always")
def padded(hidden, bits):
    """Factors of a row in the room for them, as many as whole vectors hold; as many addends follow."""
    return (groups(hidden, bits) + LANES - 1) // LANES * LANES


@cache
def fill_room(bits: int):
    """The function that writes a section's factors, then its addends, into the room from `place` on."""

    @compiled
    def fill_room(numbers, at, hidden, room, place):
        count, wide = groups(hidden, bits), padded(hidden, bits)
        scales = at + HEAD_BYTES
        for first in range(0, count, LANES):
            found = factors(numbers, at, scales + first, scales + count + first)
            store_rows(room, place + first, wide, found, LANES)

    return fill_room


def weights_at_once(bits: int) -> tuple[int, int, int]:
    """Bytes of a block, its groups, and the weights of a cache line."""
    nbytes = BLOCK * bits // 8
    return nbytes, 1 if bits == 4 else FIELDS, CACHE_LINE // nbytes * BLOCK


@cache
def multiply_tile(rows: int, vectors: int, bits: int, lookup: bool):
    """The function that sets `y[vector + v, place + i]` to the product of row i with a vector, for so many of both.

    The factors of the rows begin at `first` in the room. Meanwhile the caches are asked for the rows behind these.
    """
    weights_of, lanes = block_weights(bits, lookup, rows), rows * vectors * BLOCK
    block_bytes, of_block, line = weights_at_once(bits)

    @compiled
    def multiply_tile(numbers, at, stride, room, first, x, vector, y, place):
        hidden, column, group = x.shape[1], vector * x.shape[1], first
        wide, start, sums = padded(hidden, bits), at + codes_start(hidden, bits), zeros(lanes)
        for block in range(hidden // BLOCK):
            if block * BLOCK % line == 0:
                for row in range(rows):
                    prefetch_l2(numbers, start + (row + rows) * stride)
                    prefetch(numbers, start + row * stride + NEAR_BYTES)
            weights = repeat(weights_of(numbers, start, stride, room, group, wide), vectors)
            sums = fma(weights, load_tile(x, column, hidden, rows, vectors, BLOCK), sums)
            start, group, column = start + block_bytes, group + of_block, column + BLOCK
        store_rows(y, vector * y.shape[1] + place, y.shape[1], totals(sums, BLOCK), rows)

    return multiply_tile


@cache
def multiply_rows(bits: int, lookup: bool):
    """The function that multiplies rows, as `ffn_of_parts` describes it."""
    fill, at_once = fill_room(bits), VECTORS if lookup else 1  # AVX2 has no registers for more
    of_one, of_four, of_vectors = (multiply_tile(*tile, bits, lookup) for tile in ((1, 1), (ROWS, 1), (1, at_once)))

    @compiled
    def multiply(given, places, rows, x, y, place):
        numbers, room = given
        at, stride, step = places[0], places[1] - places[0], 2 * padded(x.shape[1], bits)  # records follow each other
        for i in range(rows):
            fill(numbers, at + i * stride, x.shape[1], room, i * step)
        together = len(x) // at_once * at_once if lookup else 0
        for vector in range(0, together, at_once):
            for i in range(rows):
                of_vectors(numbers, at + i * stride, stride, room, i * step, x, vector, y, place + i)
        for vector in range(together, len(x)):
            if lookup and rows == ROWS:
                of_four(numbers, at, stride, room, 0, x, vector, y, place)
            else:
                for i in range(rows):
                    of_one(numbers, at + i * stride, stride, room, i * step, x, vector, y, place + i)

    return multiply


@cache
def add_columns_of(bits: int, lookup: bool):
    """The function that adds down columns, as `ffn_of_parts` describes it."""
    block_of, fill = block_weights(bits, lookup), fill_room(bits)
    block_bytes, of_block, line = weights_at_once(bits)

    @numba.njit(inline="always")
    def weights_of(given, at, column, row, hidden):
        numbers, room = given
        block, wide = column // BLOCK, padded(hidden, bits)
        start = at + codes_start(hidden, bits) + block * block_bytes
        if column % line == 0:
            prefetch(numbers, start + NEAR_BYTES)
        return block_of(numbers, start, 0, room, 2 * row * wide + block * of_block, wide)

    @numba.njit(inline="always")
    def rest_of(given, at):
        return np.float32(0)  # sections are whole blocks

    add = adding(weights_of, rest_of)

    @compiled
    def add_columns(given, places, values, first, rows, sums):
        numbers, room = given
        for i in range(rows):
            fill(numbers, places[first + i], sums.shape[1], room, 2 * i * padded(sums.shape[1], bits))
        add(given, places, values, first, rows, sums)

    return add_columns


@cache
def request_section(bits: int):
    """The function that asks the second cache for a section, as `ffn_of_parts` describes it."""

    @compiled
    def request_section(given, place, hidden):
        numbers = given[0]
        for at in range(place, place + section_bytes(hidden, bits), CACHE_LINE):
            prefetch_l2(numbers, at)

    return request_section


@cache
def ffn(lookup: bool, bits: int):
    """The function of parts, as `ffn_of_parts` describes it."""

    @numba.njit(inline="always")
    def prepare(rows, x):
        return rows.reshape(-1), np.empty(2 * ROWS * padded(x.shape[1], bits), np.float32)

    functions = multiply_rows(bits, lookup), add_columns_of(bits, lookup)
    return ffn_of_parts(*functions, section_start(bits), prepare, request_section(bits))

"""The kernels of SpQR's dense part for CPUs with AVX2: a tile at a step.

`_statistics` finds scale and zero point of the tile's sixteen rows, a lane for each row. The product of a row is
Σ s·(q − z)·x, over tiles: s·(Σ q·x − z·Σ x).

With fp32 activations a lane stays a row. The 32 bits from byte 0 of a word and those from byte 3 each hold eight codes,
both at bits 6, 9 and so on to 27. Codes are not shifted down: q·2^p is converted, and x is divided by 2^p beforehand,
which is exact. So eight weights cost an AND, a conversion and an FMA.

Several vectors share the codes of a tile, once these are ready to be multiplied. `cpu_avx512` builds on this module.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from toolkit.kernels.csr import cpu_simd as csr
from toolkit.kernels.engine import simd
from toolkit.kernels.engine.compiled import compiled
from toolkit.kernels.engine.simd import (
    F16,
    F32,
    I8,
    I16,
    I32,
    I64,
    call,
    constant,
    in_all_lanes,
    multiply_add,
    prefetch,
    store,
    zeros,
)
from toolkit.kernels.spqr.shared import LEVELS, SECOND_ORDER, TILE, WEIGHTS, ZERO

LANES = 8
FLOATS, INTS, QUADS = ir.VectorType(F32, 8), ir.VectorType(I32, 8), ir.VectorType(I64, 4)
SHIFTS = [WEIGHTS + 3 * lane for lane in range(LANES)]  # where the codes lie in both 32-bit parts of a word
ROW = ir.VectorType(F32, TILE)
EVERY_LEVEL = ir.Constant(FLOATS, [float(level) for level in range(LEVELS)])
HIGH_PART = 24  # the bit with which the second part begins
LARGEST_TWO_BYTES = 127 * 256  # of an activation in two signed bytes: 256 times what one holds
HALF = 4  # words in a register
AHEAD = 4096 // 8  # words that are prefetched ahead: the hardware stops at the end of a page


def rows_of_lanes(half: int) -> list[int]:
    """The rows, lane by lane, whose parts `vshufps` takes from two registers of `half` words each."""
    return [row for first in range(0, half, 2) for row in (first, first + 1, half + first, half + first + 1)]


ROWS_OF_LANES = rows_of_lanes(HALF)


def _lookup(builder, table, codes) -> ir.Value:
    """The entries of a table of eight fp32 numbers; of each code the three low bits count."""
    return call(builder, "x86.avx2.permps", FLOATS, table, codes)


def dequantise(builder, codes, scale, zero) -> ir.Value:
    """`shared.dequantise` of a vector of codes, which are fp32 already."""
    return _round(builder, builder.fmul(scale, _round(builder, builder.fsub(codes, zero))))


def _round(builder, value) -> ir.Value:
    """Through fp16 and back."""
    return builder.fpext(builder.fptrunc(value, ir.VectorType(F16, value.type.count)), value.type)


def _four_words(builder, word) -> list[ir.Value]:
    """The sixteen words of a tile, four in a vector."""
    first = builder.bitcast(word, QUADS.as_pointer())
    return [builder.load(builder.gep(first, [I64(part)]), align=8) for part in range(4)]


def _parts(builder, words: list[ir.Value], start: int) -> list[ir.Value]:
    """32 bits of each word from this bit on, for the two halves of the tile, a lane for each row."""
    moved = [builder.lshr(four, constant(QUADS, start)) if start else four for four in words]
    moved = [builder.bitcast(four, INTS) for four in moved]
    order = ir.Constant(INTS, [0, 2, 8, 10, 4, 6, 12, 14])  # gives `ROWS_OF_LANES`
    return [builder.shuffle_vector(moved[half], moved[half + 1], order) for half in (0, 2)]


def _statistics(builder, word, low: list[ir.Value]) -> tuple[ir.Value, ir.Value]:
    """Scales and zero points of a tile's rows; `low` holds the words' low 32 bits, in halves."""
    carried = I64(0)
    for byte in range(8):
        found = builder.lshr(builder.load(builder.gep(word, [I64(2 * byte)])), I64(SECOND_ORDER))
        carried = builder.or_(carried, builder.shl(builder.and_(found, I64(0xFF)), I64(8 * byte)))
    four = builder.fpext(builder.bitcast(carried, ir.VectorType(F16, 4)), ir.VectorType(F32, 4))
    scale_scale, zero_scale, scale_zero, zero_zero = (
        in_all_lanes(builder, builder.extract_element(four, I32(number)), LANES) for number in range(4)
    )
    scales = dequantise(builder, EVERY_LEVEL, scale_scale, scale_zero)
    zero_points = dequantise(builder, EVERY_LEVEL, zero_scale, zero_zero)
    of_zeros = [builder.lshr(codes, constant(INTS, ZERO)) for codes in low]
    return tuple(
        simd.join(builder, [_lookup(builder, table, codes) for codes in halves])
        for table, halves in ((scales, low), (zero_points, of_zeros))
    )


def vectors_of(context, builder, signature, arguments, number: int) -> list[tuple[ir.Value, ir.Value, ir.Value]]:
    """For each vector the address of a tile's prepared activations, their scale and their sum.

    The function's arguments are those of `multiply_tile`.
    """
    (x, scales, sums), (tile, wide, vector) = arguments[2:5], arguments[5:8]
    found = []
    for each in range(number):
        place = builder.add(builder.mul(builder.add(vector, I64(each)), wide), tile)
        column = builder.mul(place, I64(TILE))
        kind = context.get_value_type(signature.args[2].dtype)
        given = [simd.pointer(context, builder, signature.args[2], x, column, kind)]
        for k, array in ((3, scales), (4, sums)):
            given.append(builder.load(simd.pointer(context, builder, signature.args[k], array, place, F32)))
        found.append(tuple(given))
    return found


def add_up(builder, sums, number: int, scales, zero_points, x_sum, product) -> ir.Value:
    """The sums of the vector with this number, with s · (Σ q·x − z · Σ x) of a tile added; `product` is Σ q·x."""
    before = simd.take(builder, sums, range(TILE * number, TILE * (number + 1)))
    product = multiply_add(builder, zero_points, in_all_lanes(builder, builder.fneg(x_sum), TILE), product)
    return multiply_add(builder, scales, product, before)


def _multiply_float(builder, word, vectors, sums) -> ir.Value:
    words = _four_words(builder, word)
    low, high = (_parts(builder, words, start) for start in (0, HIGH_PART))
    (scales, zero_points), parts = _statistics(builder, word, low), (simd.join(builder, low), simd.join(builder, high))
    totals = [[None, None] for _ in vectors]  # over the low and over the high parts
    for lane, shift in enumerate(SHIFTS):
        for part, codes in enumerate(parts):
            weights = builder.sitofp(builder.and_(codes, constant(codes.type, 7 << shift)), ROW)
            for (x, _, _), total in zip(vectors, totals, strict=True):
                each_x = in_all_lanes(builder, builder.load(builder.gep(x, [I64(LANES * part + lane)])), TILE)
                before = total[part]
                total[part] = (
                    multiply_add(builder, weights, each_x, before) if before else builder.fmul(weights, each_x)
                )
    results = []
    for number, ((_, _, of_x), total) in enumerate(zip(vectors, totals, strict=True)):
        results.append(add_up(builder, sums, number, scales, zero_points, of_x, builder.fadd(*total)))
    return simd.join(builder, results)


def fused(generate: Callable):
    """The intrinsic that adds a tile's products with one or more vectors to `sums`, sixteen lanes for each.

    `wide` tiles lie beside each other; `x`, `tile_scales` and `tile_sums` are prepared. `generate` writes the
    instructions, given the tile's address, what `vectors_of` gives, and `sums`, in which a lane is a row.
    """

    @intrinsic
    def multiply_tile(typing_context, words, at, x, tile_scales, tile_sums, tile, wide, vector, sums):
        def written(context, builder, signature, arguments):
            word = simd.pointer(context, builder, words, *arguments[:2], I64)
            vectors = vectors_of(context, builder, signature, arguments, sums.lanes // TILE)
            return generate(builder, word, vectors, arguments[8])

        places = [types.int64] * 3
        return sums(words, types.int64, x, tile_scales, tile_sums, *places, sums), written

    return multiply_tile


def in_order(half: int):
    """The intrinsic that orders sums by row, given them in the order of `rows_of_lanes(half)`, again and again."""

    @intrinsic
    def in_order(typing_context, sums):
        number = 2 * half
        lanes = [rows_of_lanes(half).index(row) for row in range(number)]
        order = [first + lane for first in range(0, sums.lanes, number) for lane in lanes]
        return sums(sums), lambda context, builder, signature, arguments: simd.take(builder, arguments[0], order)

    return in_order


@cache
def decode_tile(by_table: bool):
    """The intrinsic that decodes a tile into sixteen rows of `dense`, from the place `target` on.

    `by_table` looks codes up among the eight weights that a row can have; else each is converted by itself.
    """

    @intrinsic
    def decode_tile(typing_context, words, at, dense, target):
        def generate(context, builder, signature, arguments):
            word = simd.pointer(context, builder, words, *arguments[:2], I64)
            columns = builder.extract_value(arguments[2], 5)
            target, stride = arguments[3], builder.extract_value(columns, 1)
            low = _parts(builder, _four_words(builder, word), 0)
            found, shifts = _statistics(builder, word, low), ir.Constant(INTS, SHIFTS)
            for row in range(TILE):
                lane = I32(row // LANES * LANES + ROWS_OF_LANES.index(row % LANES))
                scale, zero = (in_all_lanes(builder, builder.extract_element(rows, lane), LANES) for rows in found)
                table = dequantise(builder, EVERY_LEVEL, scale, zero) if by_table else None
                whole = builder.load(builder.gep(word, [I64(row)]))
                out = simd.pointer(context, builder, dense, arguments[2], target, FLOATS)
                for part in range(2):
                    bits = builder.trunc(builder.lshr(whole, I64(HIGH_PART * part)), I32)
                    codes = builder.lshr(in_all_lanes(builder, bits, LANES), shifts)
                    if by_table:
                        weights = _lookup(builder, table, codes)
                    else:
                        codes = builder.and_(codes, constant(INTS, LEVELS - 1))
                        weights = dequantise(builder, builder.sitofp(codes, FLOATS), scale, zero)
                    builder.store(weights, builder.gep(out, [I64(part)]), align=4)
                target = builder.add(target, stride)
            return context.get_dummy_value()

        return types.void(words, types.int64, dense, types.int64), generate

    return decode_tile


@cache
def decode_stripe(by_table: bool):
    """The function that decodes one tile row into `dense` [16, 16 · wide]."""
    decode = decode_tile(by_table)

    @compiled
    def decode_stripe(words, tall, dense):
        at = tall * words.shape[1] * TILE
        for tile in range(words.shape[1]):
            prefetch(words, at + AHEAD)
            prefetch(words, at + AHEAD + LANES)
            decode(words, at, dense, TILE * tile)
            at += TILE

    return decode_stripe


@dataclass(frozen=True)
class Fused:
    """The parts of a fused product; `at_once` vectors share a decoded tile."""

    multiply: Callable
    in_order: Callable
    at_once: int
    prepare: Callable  # compiled: activations, prepared ones, a scale and a sum for each tile
    prepared: type  # of the prepared activations


@cache
def product(kernel: Fused, storage: str, bits: int):
    """The compiled function that sets `y[vector, row]` to the product with the weights and outliers of tile rows.

    `x` is fp32 and padded; `prepared`, `tile_scales` and `tile_sums` are what the backend's `prepare` makes of it. The
    sums of a vector are the same, to the bit, however many vectors there are.
    """
    multiply, in_order, at_once, of_all = kernel.multiply, kernel.in_order, kernel.at_once, TILE * kernel.at_once
    add_outliers = csr.add_product(storage, bits)

    @numba.njit(inline="always")
    def multiply_row(words, tall, prepared, tile_scales, tile_sums, vector, total):
        wide = words.shape[1]
        for tile in range(wide):
            at = (tall * wide + tile) * TILE
            prefetch(words, at + AHEAD)
            prefetch(words, at + AHEAD + LANES)
            total = multiply(words, at, prepared, tile_scales, tile_sums, tile, wide, vector, total)
        return total

    @compiled
    def product(words, offsets, col_vals, x, prepared, tile_scales, tile_sums, y, first, last):
        sums = np.zeros((len(x), TILE), np.float32)
        together = len(x) // at_once * at_once
        for tall in range(first, last):
            rows = min(TILE, y.shape[1] - TILE * tall)
            if words.shape[1]:
                for vector in range(0, together, at_once):
                    total = multiply_row(words, tall, prepared, tile_scales, tile_sums, vector, zeros(of_all))
                    store(sums, vector * TILE, in_order(total))
                for vector in range(together, len(x)):
                    total = multiply_row(words, tall, prepared, tile_scales, tile_sums, vector, zeros(TILE))
                    store(sums, vector * TILE, in_order(total))
            for vector in range(len(x)):
                add_outliers(offsets, col_vals, tall, rows, x, vector, sums[vector])
                for row in range(rows):
                    y[vector, TILE * tall + row] = sums[vector, row]

    return product


def preparing(generate: Callable):
    """The compiled function that prepares vectors [vectors, 16 · tiles]: for each tile what `generate` makes of its x.

    `generate` returns prepared activations of the type of `prepared`, their scale and their sum.
    """

    @intrinsic
    def prepare_tile(typing_context, x, prepared, tile_scales, tile_sums, tile):
        def written(context, builder, signature, arguments):
            tile = arguments[4]
            column = builder.mul(tile, I64(TILE))
            given = builder.load(simd.pointer(context, builder, x, arguments[0], column, ROW), align=4)
            for k, value in enumerate(generate(builder, given), 1):
                place = column if k == 1 else tile
                target = simd.pointer(context, builder, signature.args[k], arguments[k], place, value.type)
                builder.store(value, target, align=1)
            return context.get_dummy_value()

        return types.void(x, prepared, tile_scales, tile_sums, types.int64), written

    @compiled
    def prepare(x, prepared, tile_scales, tile_sums):
        for tile in range(tile_sums.size):
            prepare_tile(x, prepared, tile_scales, tile_sums, tile)

    return prepare


def _over_lanes(builder, operation: str, values, *start) -> ir.Value:
    """The sum or the maximum of all lanes."""
    kind, element = ("f32", F32) if values.type == ROW else ("i32", I32)
    fastmath = ("reassoc", "nnan") if element == F32 else ()
    return call(builder, f"vector.reduce.{operation}.v{TILE}{kind}", element, *start, values, fastmath=fastmath)


def _of_lanes(builder, operation: str, *values) -> ir.Value:
    return call(builder, f"{operation}.v{TILE}f32", ROW, *values)


def _as_floats(builder, x) -> tuple[ir.Value, ...]:
    """Divided by the power of two at which their codes lie in a word."""
    powers = ir.Constant(ROW, [2.0**-shift for _ in range(2) for shift in SHIFTS])
    return builder.fmul(x, powers), F32(1.0), _over_lanes(builder, "fadd", x, F32(0.0))


def _as_two_bytes(builder, x) -> tuple[ir.Value, ...]:
    """Sixteen high bytes, then sixteen low ones, both signed: an integer is 256 · high + low. With scale and sum.

    Integers go from −32,512 to 32,512, which is the largest of the sixteen.
    """
    largest = float(LARGEST_TWO_BYTES)
    scale = builder.fdiv(_over_lanes(builder, "fmax", _of_lanes(builder, "fabs", x)), F32(largest))
    positive = builder.fcmp_ordered(">", scale, F32(0.0))
    inverse = builder.select(positive, builder.fdiv(F32(1.0), scale), F32(0.0))
    rounded = _of_lanes(builder, "rint", builder.fmul(x, in_all_lanes(builder, inverse, TILE)))
    limited = _of_lanes(builder, "minnum", rounded, constant(ROW, largest))
    limited = _of_lanes(builder, "maxnum", limited, constant(ROW, -largest))
    integers = builder.fptosi(limited, ir.VectorType(I32, TILE))
    total = builder.fmul(scale, builder.sitofp(_over_lanes(builder, "add", integers), F32))
    low = builder.trunc(integers, ir.VectorType(I8, TILE))
    rest = builder.sub(integers, builder.sext(low, integers.type))
    high = builder.trunc(builder.ashr(rest, constant(integers.type, 8)), low.type)
    return builder.bitcast(simd.join(builder, [high, low]), ir.VectorType(I16, TILE)), scale, total


FLOAT = Fused(fused(_multiply_float), in_order(HALF), 2, preparing(_as_floats), np.float32)
prepare_two_bytes = preparing(_as_two_bytes)

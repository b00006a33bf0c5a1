"""The kernels of SpQR's dense part for CPUs with AVX2: a tile at a step.

`_statistics` finds scale and zero point of the tile's sixteen rows, a lane for each row. The product of a row is
Σ s·(q − z)·x, over tiles: s·(Σ q·x − z·Σ x).

With fp32 activations a lane stays a row. The 32 bits from byte 0 of a word and those from byte 3 each hold eight codes,
both at bits 6, 9 and so on to 27. Codes are not shifted down: q·2^p is converted, and x is divided by 2^p beforehand,
which is exact. So eight weights cost an AND, a conversion and an FMA.

With int8 activations each code gets its own 16-bit lane: it is q·2^p there, p < 8, and meets the activation times
2^(7 − p). Sixteen weights cost a byte shuffle, an AND and a `vpmaddwd`.
"""

from functools import cache

import numba
import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from toolkit.kernels.common import simd
from toolkit.kernels.common.compiled import compiled
from toolkit.kernels.common.products import ROWS, multiply_rows
from toolkit.kernels.common.simd import I32, I64, Vector, prefetch, store, zeros
from toolkit.kernels.csr import cpu_simd as csr
from toolkit.kernels.spqr.shared import LEVELS, SECOND_ORDER, TILE, WEIGHTS, ZERO

LANES = 8
F32, I16 = ir.FloatType(), ir.IntType(16)
FLOATS, INTS, QUADS, SHORTS = (
    ir.VectorType(F32, 8),
    ir.VectorType(I32, 8),
    ir.VectorType(I64, 4),
    ir.VectorType(I16, 16),
)
SHIFTS = [WEIGHTS + 3 * lane for lane in range(LANES)]  # where the codes lie in both 32-bit parts of a word
HIGH_PART = 24  # the bit with which the second part begins
# for integers: the first of the two bytes that hold a column's code, and the code's first bit in them
BYTES, BITS = zip(*(divmod(WEIGHTS + 3 * column, 8) for column in range(TILE)), strict=True)
LARGEST_BIT = 7
ROWS_OF_LANES = (0, 1, 4, 5, 2, 3, 6, 7)  # the rows of a half tile, lane by lane, as AVX2's shuffles leave them
AHEAD = 4096 // 8  # words that are prefetched ahead: the hardware stops at the end of a page


def _splat(builder, value, lanes: int = LANES) -> ir.Value:
    """A vector of one number."""
    undefined = ir.Constant(ir.VectorType(value.type, lanes), ir.Undefined)
    first = builder.insert_element(undefined, value, I32(0))
    return builder.shuffle_vector(first, undefined, ir.Constant(ir.VectorType(I32, lanes), [0] * lanes))


def _lookup(builder, table, codes) -> ir.Value:
    """The entries of a table of eight fp32 numbers; of each code the three low bits count."""
    kind = ir.FunctionType(FLOATS, [FLOATS, INTS])
    return builder.call(builder.module.declare_intrinsic("llvm.x86.avx2.permps", (), kind), [table, codes])


def _dequantise(builder, codes, scale, zero) -> ir.Value:
    """`shared.dequantise` of eight codes, which are fp32 already."""
    return _round(builder, builder.fmul(scale, _round(builder, builder.fsub(codes, zero))))


def _round(builder, value) -> ir.Value:
    """Through fp16 and back."""
    return builder.fpext(builder.fptrunc(value, ir.VectorType(ir.HalfType(), value.type.count)), value.type)


def _multiply_add(builder, a, b, c) -> ir.Value:
    kind = ir.FunctionType(a.type, [a.type] * 3)
    return builder.call(builder.module.declare_intrinsic(f"llvm.fma.v{a.type.count}f32", (), kind), [a, b, c])


def _constant(kind: ir.VectorType, value: int) -> ir.Constant:
    return ir.Constant(kind, [value] * kind.count)


def _levels() -> ir.Constant:
    return ir.Constant(FLOATS, [float(level) for level in range(LEVELS)])


def _four_words(builder, word) -> list[ir.Value]:
    """The sixteen words of a tile, four in a vector."""
    first = builder.bitcast(word, QUADS.as_pointer())
    return [builder.load(builder.gep(first, [I64(part)]), align=8) for part in range(4)]


def _parts(builder, words: list[ir.Value], start: int) -> list[ir.Value]:
    """32 bits of each word from this bit on, for the two halves of the tile, a lane for each row."""
    moved = [builder.lshr(four, _constant(QUADS, start)) if start else four for four in words]
    moved = [builder.bitcast(four, INTS) for four in moved]
    order = ir.Constant(INTS, [0, 2, 8, 10, 4, 6, 12, 14])  # gives `ROWS_OF_LANES`
    return [builder.shuffle_vector(moved[half], moved[half + 1], order) for half in (0, 2)]


def _statistics(builder, word, low: list[ir.Value]) -> list[tuple[ir.Value, ir.Value]]:
    """Scales and zero points of the rows in each half of a tile; `low` holds the words' low 32 bits."""
    carried = I64(0)
    for byte in range(8):
        found = builder.lshr(builder.load(builder.gep(word, [I64(2 * byte)])), I64(SECOND_ORDER))
        carried = builder.or_(carried, builder.shl(builder.and_(found, I64(0xFF)), I64(8 * byte)))
    four = builder.fpext(builder.bitcast(carried, ir.VectorType(ir.HalfType(), 4)), ir.VectorType(F32, 4))
    scale_scale, zero_scale, scale_zero, zero_zero = (
        _splat(builder, builder.extract_element(four, I32(number))) for number in range(4)
    )
    scales = _dequantise(builder, _levels(), scale_scale, scale_zero)
    zero_points = _dequantise(builder, _levels(), zero_scale, zero_zero)
    return [
        (
            _lookup(builder, scales, codes),
            _lookup(builder, zero_points, builder.lshr(codes, _constant(INTS, ZERO))),
        )
        for codes in low
    ]


@intrinsic
def statistics(typing_context, words, at):
    """A tile's scales, sixteen lanes, then its zero points."""

    def generate(context, builder, signature, arguments):
        word = simd.pointer(context, builder, words, *arguments, I64)
        low = _parts(builder, _four_words(builder, word), 0)
        (upper, lower) = _statistics(builder, word, low)
        return simd.join(builder, [upper[0], lower[0], upper[1], lower[1]])

    return Vector(types.float32, 4 * LANES)(words, types.int64), generate


def _halves(builder, found) -> list[tuple[ir.Value, ir.Value]]:
    """What `statistics` found, as `_statistics` gives it."""
    parts = [simd.take(builder, found, range(LANES * part, LANES * (part + 1))) for part in range(4)]
    return [(parts[0], parts[2]), (parts[1], parts[3])]


@intrinsic
def multiply_tile(typing_context, words, at, x, column, tile_scale, tile_sum, found, sums):
    """Add a tile's product to `sums`, a lane for each row. `found` are its `statistics`.

    `x` and `tile_sum` are as `prepare` makes them.
    """

    def generate(context, builder, signature, arguments):
        word = simd.pointer(context, builder, words, *arguments[:2], I64)
        some_x = simd.pointer(context, builder, x, *arguments[2:4], F32)
        four = _four_words(builder, word)
        floats, totals = ir.VectorType(F32, TILE), [None, None]  # over the low and over the high parts
        parts = [simd.join(builder, _parts(builder, four, start)) for start in (0, HIGH_PART)]
        for lane, shift in enumerate(SHIFTS):
            for part, codes in enumerate(parts):
                each_x = _splat(builder, builder.load(builder.gep(some_x, [I64(LANES * part + lane)])), TILE)
                weights = builder.sitofp(builder.and_(codes, _constant(codes.type, 7 << shift)), floats)
                before = totals[part]
                totals[part] = (
                    _multiply_add(builder, weights, each_x, before) if before else builder.fmul(weights, each_x)
                )
        scales, zero_points = (simd.take(builder, arguments[6], range(at, at + TILE)) for at in (0, TILE))
        less = _splat(builder, builder.fneg(arguments[5]), TILE)
        product = _multiply_add(builder, zero_points, less, builder.fadd(*totals))
        return _multiply_add(builder, scales, product, arguments[7])

    return sums(words, types.int64, x, types.int64, types.float32, types.float32, found, sums), generate


@intrinsic
def multiply_tile_int8(typing_context, words, at, x, column, tile_scale, tile_sum, found, sums):
    """Add a tile's product to `sums`: two lanes for each row in order, then what zero points take off, as above.

    `x`, `tile_scale` and `tile_sum` are as `prepare_int8` makes them.
    """

    def generate(context, builder, signature, arguments):
        word = simd.pointer(context, builder, words, *arguments[:2], I64)
        some_x = builder.bitcast(simd.pointer(context, builder, x, *arguments[2:4], I16), I64.as_pointer())
        each_x = [_splat(builder, builder.load(builder.gep(some_x, [I64(k)]), align=2), 4) for k in range(4)]
        each_x = [builder.bitcast(four, SHORTS) for four in each_x]
        kind = ir.FunctionType(INTS, [SHORTS, SHORTS])
        multiply = builder.module.declare_intrinsic("llvm.x86.avx2.pmadd.wd", (), kind)
        four = _four_words(builder, word)
        halves = _halves(builder, arguments[6])
        tile_scale, tile_sum = (_splat(builder, value) for value in arguments[4:6])
        results = []
        for part, some_words in enumerate(four):
            total = None
            for k in range(4):
                columns = range(4 * k, 4 * k + 4)
                order = [8 * row + BYTES[column] + more for row in range(4) for column in columns for more in range(2)]
                moved = simd.take(builder, builder.bitcast(some_words, ir.VectorType(ir.IntType(8), 32)), order)
                mask = ir.Constant(SHORTS, [7 << BITS[column] for column in columns] * 4)
                product = builder.call(multiply, [builder.and_(builder.bitcast(moved, SHORTS), mask), each_x[k]])
                total = builder.add(total, product) if total else product
            scale = builder.fmul(halves[part // 2][0], tile_scale)
            lanes = [ROWS_OF_LANES.index(4 * (part % 2) + row) for row in range(4) for _ in range(2)]
            before = simd.take(builder, arguments[7], range(LANES * part, LANES * (part + 1)))
            floats = builder.sitofp(total, FLOATS)
            results.append(_multiply_add(builder, floats, simd.take(builder, scale, lanes), before))
        for half, (scale, zero) in enumerate(halves):
            before = simd.take(builder, arguments[7], range(LANES * (4 + half), LANES * (5 + half)))
            results.append(_multiply_add(builder, builder.fmul(scale, zero), tile_sum, before))
        empty = [ir.Constant(FLOATS, None)] * 2  # vectors are joined in pairs of pairs
        return simd.join(builder, results + empty)

    return sums(words, types.int64, x, types.int64, types.float32, types.float32, found, sums), generate


@intrinsic
def row_sums(typing_context, sums):
    """The sum of each of sixteen rows, in order, of what `multiply_tile` or `multiply_tile_int8` adds to."""

    def generate(context, builder, signature, arguments):
        (value,) = arguments
        order = [LANES * half + ROWS_OF_LANES.index(row) for half in range(2) for row in range(LANES)]
        if sums.lanes == TILE:
            return simd.take(builder, value, order)
        first, second = (simd.take(builder, value, range(lane, 2 * TILE, 2)) for lane in range(2))
        less = simd.take(builder, value, [2 * TILE + lane for lane in order])
        return builder.fsub(builder.fadd(first, second), less)

    return Vector(types.float32, TILE)(sums), generate


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
            halves, shifts = _statistics(builder, word, low), ir.Constant(INTS, SHIFTS)
            for row in range(TILE):
                lane = I32(ROWS_OF_LANES.index(row % LANES))
                scale, zero = (_splat(builder, builder.extract_element(v, lane)) for v in halves[row // LANES])
                table = _dequantise(builder, _levels(), scale, zero) if by_table else None
                whole = builder.load(builder.gep(word, [I64(row)]))
                out = simd.pointer(context, builder, dense, arguments[2], target, FLOATS)
                for part in range(2):
                    bits = builder.trunc(builder.lshr(whole, I64(HIGH_PART * part)), I32)
                    codes = builder.lshr(_splat(builder, bits), shifts)
                    if by_table:
                        weights = _lookup(builder, table, codes)
                    else:
                        codes = builder.and_(codes, _constant(INTS, LEVELS - 1))
                        weights = _dequantise(builder, builder.sitofp(codes, FLOATS), scale, zero)
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


@cache
def product(integers: bool, storage: str, bits: int):
    """The compiled function that sets `y[vector, row]` to the product with the weights and outliers of tile rows.

    `x` is fp32 and padded; `prepared`, `tile_scales` and `tile_sums` are what `prepare` or `prepare_int8` makes of it.
    """
    multiply = multiply_tile_int8 if integers else multiply_tile
    lanes = 4 * TILE if integers else TILE
    add_outliers = csr.add_product(storage, bits)

    @compiled
    def product(words, offsets, col_vals, x, prepared, tile_scales, tile_sums, y, first, last):
        wide, sums = words.shape[1], np.empty(TILE, np.float32)
        for tall in range(first, last):
            rows = min(TILE, y.shape[1] - TILE * tall)
            for vector in range(len(x)):
                total, at, end = zeros(lanes), tall * wide * TILE, (tall + 1) * wide * TILE
                # the next tile's are found meanwhile: they come from a long chain of instructions
                following = statistics(words, at) if wide else zeros(32)
                for tile in range(wide):
                    prefetch(words, at + AHEAD)
                    prefetch(words, at + AHEAD + LANES)
                    found = following
                    following = statistics(words, min(at + TILE, end - TILE))
                    place = vector * wide + tile
                    scale, of_x = simd.item(tile_scales, place), simd.item(tile_sums, place)
                    total = multiply(words, at, prepared, TILE * place, scale, of_x, found, total)
                    at += TILE
                store(sums, 0, row_sums(total))
                add_outliers(offsets, col_vals, tall, rows, x, vector, sums)
                for row in range(rows):
                    y[vector, TILE * tall + row] = sums[row]

    return product


@compiled
def prepare(x, prepared, tile_scales, tile_sums):
    """Divide each activation by the power of two at which its code lies in a word, and sum those of each tile."""
    for vector in range(len(x)):
        for tile in range(x.shape[1] // TILE):
            found = numba.float32(0)
            power = numba.float32(2.0**-WEIGHTS)
            for lane in range(LANES):
                for column in (TILE * tile + lane, TILE * tile + LANES + lane):
                    found += x[vector, column]
                    prepared[vector, column] = x[vector, column] * power
                power *= numba.float32(0.125)
            tile_sums[vector, tile] = found
            tile_scales[vector, tile] = 1


@compiled
def prepare_int8(x, prepared, tile_scales, tile_sums):
    """Quantise the sixteen activations of each tile to −127 to 127, and shift each to where its code's bits want it."""
    for vector in range(len(x)):
        for tile in range(x.shape[1] // TILE):
            largest = numba.float32(0)
            for column in range(TILE * tile, TILE * (tile + 1)):
                largest = max(largest, abs(x[vector, column]))
            scale = largest / numba.float32(127)
            inverse = numba.float32(1) / scale if scale > 0 else numba.float32(0)
            total = numba.int32(0)
            for column in range(TILE):
                integer = numba.int32(np.rint(x[vector, TILE * tile + column] * inverse))
                integer = min(max(integer, numba.int32(-127)), numba.int32(127))
                total += integer
                bit = (WEIGHTS + 3 * column) % 8
                prepared[vector, TILE * tile + column] = integer * (1 << (LARGEST_BIT - bit))
            tile_sums[vector, tile] = scale * numba.float32(total)
            tile_scales[vector, tile] = scale / numba.float32(1 << LARGEST_BIT)


_four_rows = multiply_rows(torch.float32)


@compiled
def multiply_decoded(dense, x, sums):
    """Set `sums[vector]` [16] to the product of sixteen dense rows of whole lanes with each `x[vector]`."""
    bits = dense.view(np.uint32)
    for row in range(0, TILE, ROWS):
        _four_rows(bits, row, ROWS, x, sums, row)

"""The kernels of SpQR's dense part for CPUs with AVX2.

`statistics` finds the scale and the zero point of a tile's sixteen rows. Then its rows, which the first cache holds now,
are multiplied or decoded, eight weights at a step. The 32 bits from byte 0 of a word and those from byte 3 each hold
eight codes, both at bits 6, 9 and so on to 27.

The product of a row is Σ s·(q − z)·x = Σ over tiles of s·(Σ q·x − z·Σ x). Codes are not shifted down: q·2^p is
converted, and x is divided by 2^p beforehand, which is exact. So eight weights cost a broadcast by a load, an AND, a
conversion and an FMA.

The product with int8 activations gives each code its own 16-bit lane: q·2^p with p < 8 there, times the integer
activation ·2^(7 − p). A word costs a broadcast, a byte shuffle, an AND, one `vpmaddwd`, a conversion and an FMA.
"""

from functools import cache

import numba
import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from toolkit.kernels.common import simd
from toolkit.kernels.common.elements import TO_FLOAT32
from toolkit.kernels.common.products import LANES_TO_FLOAT32, ROWS, multiply_rows
from toolkit.kernels.common.simd import I32, I64, Vector, fma, load, prefetch, store, zeros
from toolkit.kernels.common.threads import COMPILE
from toolkit.kernels.csr import cpu_simd as csr
from toolkit.kernels.spqr.shared import LEVELS, SECOND_ORDER, TILE, WEIGHTS, ZERO

F32, LANES, HALF_TILE = ir.FloatType(), 8, 8
HALF_LANES = LANES * HALF_TILE  # in which eight rows are summed
FLOATS, INTS = ir.VectorType(F32, LANES), ir.VectorType(I32, LANES)
SHIFTS = [WEIGHTS + 3 * lane for lane in range(LANES)]  # where the codes lie in both 32-bit parts of a word
HIGH_PART = 3  # the byte with which the second part begins
# where code j lies for the integer product: the first of its two bytes, and its first bit in them
BYTES, BITS = zip(*(divmod(WEIGHTS + 3 * column, 8) for column in range(TILE)), strict=True)
LARGEST_BIT = 7
ORDER = (0, 1, 4, 5, 2, 3, 6, 7)  # in which `statistics` stores eight rows: as AVX2's shuffles leave them
TILES_AT_ONCE = 16  # whose statistics are found before their rows are multiplied
AHEAD = 4096 // 8  # words that are prefetched ahead: the hardware stops at the end of a page


def splat(builder, value, lanes: int) -> ir.Value:
    """A vector of one number."""
    undefined = ir.Constant(ir.VectorType(value.type, lanes), ir.Undefined)
    first = builder.insert_element(undefined, value, I32(0))
    return builder.shuffle_vector(first, undefined, ir.Constant(ir.VectorType(I32, lanes), [0] * lanes))


def lookup(builder, table, codes) -> ir.Value:
    """The entries of a table of eight fp32 numbers; of each code the three low bits count."""
    kind = ir.FunctionType(FLOATS, [FLOATS, INTS])
    return builder.call(builder.module.declare_intrinsic("llvm.x86.avx2.permps", (), kind), [table, codes])


def dequantise(builder, codes, scale, zero) -> ir.Value:
    """`shared.dequantise` of eight codes, which are fp32 already."""
    return _round(builder, builder.fmul(scale, _round(builder, builder.fsub(codes, zero))))


def _round(builder, value) -> ir.Value:
    """Through fp16 and back."""
    return builder.fpext(builder.fptrunc(value, ir.VectorType(ir.HalfType(), value.type.count)), value.type)


def _levels() -> ir.Constant:
    return ir.Constant(FLOATS, [float(level) for level in range(LEVELS)])


def _multiply_add(builder, a, b, c) -> ir.Value:
    function = ir.FunctionType(a.type, [a.type] * 3)
    return builder.call(builder.module.declare_intrinsic(f"llvm.fma.v{a.type.count}f32", (), function), [a, b, c])


@intrinsic
def statistics(typing_context, words, at, scales, zeros, place):
    """Put the scales and zero points of a tile's rows into the arrays, from `place` on, each half as `ORDER` says."""

    def generate(context, builder, signature, arguments):
        array, at, scales_array, zeros_array, place = arguments
        word = simd.pointer(context, builder, words, array, at, I64)
        carried = I64(0)
        for byte in range(8):
            found = builder.lshr(builder.load(builder.gep(word, [I64(2 * byte)])), I64(SECOND_ORDER))
            found = builder.shl(builder.and_(found, I64(0xFF)), I64(8 * byte))
            carried = builder.or_(carried, found)
        halves = builder.bitcast(carried, ir.VectorType(ir.HalfType(), 4))
        four = builder.fpext(halves, ir.VectorType(F32, 4))
        scale_scale, zero_scale, scale_zero, zero_zero = (
            splat(builder, builder.extract_element(four, I32(number)), LANES) for number in range(4)
        )
        of_scales = dequantise(builder, _levels(), scale_scale, scale_zero)
        of_zeros = dequantise(builder, _levels(), zero_scale, zero_zero)
        for half in range(2):
            parts = [
                builder.load(
                    builder.bitcast(builder.gep(word, [I64(HALF_TILE * half + 4 * part)]), INTS.as_pointer()), align=8
                )
                for part in range(2)
            ]
            low = ir.Constant(INTS, [0, 2, 8, 10, 4, 6, 12, 14])
            codes = builder.shuffle_vector(*parts, low)
            for kind, target, table, start in (
                (scales, scales_array, of_scales, 0),
                (zeros, zeros_array, of_zeros, ZERO),
            ):
                moved = builder.lshr(codes, ir.Constant(INTS, [start] * LANES)) if start else codes
                first = simd.pointer(context, builder, kind, target, place, FLOATS)
                builder.store(lookup(builder, table, moved), builder.gep(first, [I64(half)]), align=4)
        return context.get_dummy_value()

    return types.void(words, types.int64, scales, zeros, types.int64), generate


@intrinsic
def multiply_half(typing_context, words, at, scales, place, x, column, sums):
    """Add s · Σ q · x of eight rows to their lanes: `sums` holds eight of each row."""

    def generate(context, builder, signature, arguments):
        array, at, scales_array, place, x_array, column, sums_value = arguments
        first = simd.pointer(context, builder, x, x_array, column, FLOATS)
        each_x = [builder.load(builder.gep(first, [I64(part)]), align=4) for part in range(2)]
        mask = ir.Constant(INTS, [7 << shift for shift in SHIFTS])

        def product(row: int):
            found = None
            for part, some_x in enumerate(each_x):
                codes = builder.and_(_part(context, builder, words, array, at, row, part), mask)
                weights = builder.sitofp(codes, FLOATS)
                found = _multiply_add(builder, weights, some_x, found) if part else builder.fmul(weights, some_x)
            return found

        return _scaled_rows(context, builder, (scales, scales_array, place), sums_value, product)

    return sums(words, types.int64, scales, types.int64, x, types.int64, sums), generate


@intrinsic
def multiply_half_int8(typing_context, words, at, scales, place, x, column, sums):
    """The same with integers: `x` holds int16 activations as `prepare_int8` makes them."""

    def generate(context, builder, signature, arguments):
        array, at, scales_array, place, x_array, column, sums_value = arguments
        shorts, some_bytes = ir.VectorType(ir.IntType(16), TILE), ir.VectorType(ir.IntType(8), 32)
        each_x = builder.load(simd.pointer(context, builder, x, x_array, column, shorts), align=2)
        mask = ir.Constant(shorts, [7 << bit for bit in BITS])
        order = [8 * (column // 8) + byte + more for column, byte in enumerate(BYTES) for more in range(2)]
        kind = ir.FunctionType(INTS, [shorts, shorts])
        multiply = builder.module.declare_intrinsic("llvm.x86.avx2.pmadd.wd", (), kind)
        word = simd.pointer(context, builder, words, array, at, I64)

        def product(row: int):
            everywhere = splat(builder, builder.load(builder.gep(word, [I64(row)])), 4)
            moved = simd.take(builder, builder.bitcast(everywhere, some_bytes), order)
            codes = builder.and_(builder.bitcast(moved, shorts), mask)
            return builder.sitofp(builder.call(multiply, [codes, each_x]), FLOATS)

        return _scaled_rows(context, builder, (scales, scales_array, place), sums_value, product)

    return sums(words, types.int64, scales, types.int64, x, types.int64, sums), generate


def _scaled_rows(context, builder, scales, sums, product) -> ir.Value:
    """The lanes of eight rows plus each row's scale times its product."""
    kind, array, place = scales
    first, rows = simd.pointer(context, builder, kind, array, place, F32), []
    for row in range(HALF_TILE):
        scale = splat(builder, builder.load(builder.gep(first, [I64(ORDER.index(row))])), LANES)
        lanes = simd.take(builder, sums, range(LANES * row, LANES * (row + 1)))
        rows.append(_multiply_add(builder, product(row), scale, lanes))
    return simd.join(builder, rows)


def _part(context, builder, words, array, at, row: int, part: int) -> ir.Value:
    """The low or the high 32 bits that hold eight codes of a row, in all lanes."""
    word = simd.pointer(context, builder, words, array, at, ir.IntType(8))
    place = builder.bitcast(builder.gep(word, [I64(8 * row + HIGH_PART * part)]), I32.as_pointer())
    return splat(builder, builder.load(place, align=1), LANES)


@cache
def decode_rows(by_table: bool):
    """The intrinsic that decodes a tile into sixteen rows of `dense`, from its column on.

    `by_table` looks codes up among the eight weights that a row can have; else each is converted by itself.
    """

    @intrinsic
    def decode_rows(typing_context, words, at, scales, zeros, place, dense, target, stride):
        def generate(context, builder, signature, arguments):
            array, at, scales_array, zeros_array, place, dense_array, target, stride = arguments
            scale, zero = (
                simd.pointer(context, builder, kind, value, place, F32)
                for kind, value in ((scales, scales_array), (zeros, zeros_array))
            )
            shifts = ir.Constant(INTS, SHIFTS)
            for row in range(TILE):
                stored = I64(row // HALF_TILE * HALF_TILE + ORDER.index(row % HALF_TILE))
                both = [splat(builder, builder.load(builder.gep(found, [stored])), LANES) for found in (scale, zero)]
                table = dequantise(builder, _levels(), *both) if by_table else None
                for part in range(2):
                    codes = builder.lshr(_part(context, builder, words, array, at, row, part), shifts)
                    if by_table:
                        weights = lookup(builder, table, codes)
                    else:
                        codes = builder.and_(codes, ir.Constant(INTS, [LEVELS - 1] * LANES))
                        weights = dequantise(builder, builder.sitofp(codes, FLOATS), *both)
                    out = simd.pointer(context, builder, dense, dense_array, target, FLOATS)
                    builder.store(weights, builder.gep(out, [I64(part)]), align=4)
                target = builder.add(target, stride)
            return context.get_dummy_value()

        given = (words, types.int64, scales, zeros, types.int64, dense, types.int64, types.int64)
        return types.void(*given), generate

    return decode_rows


@cache
def decode_stripe(by_table: bool):
    """The function that decodes one tile row into `dense` [16, 16 · wide]."""
    decode = decode_rows(by_table)

    @numba.njit(inline="always")
    def decode_stripe(words, tall, dense):
        wide = words.shape[1]
        scales, zero_points = np.empty(TILE, np.float32), np.empty(TILE, np.float32)
        for tile in range(wide):
            at = (tall * wide + tile) * TILE
            prefetch(words, at + AHEAD)
            prefetch(words, at + AHEAD + 8)
            statistics(words, at, scales, zero_points, 0)
            decode(words, at, scales, zero_points, 0, dense, TILE * tile, dense.shape[1])

    return decode_stripe


@intrinsic
def row_sums(typing_context, sums):
    """The sum of each row's lanes."""

    def generate(context, builder, signature, arguments):
        (value,) = arguments
        width = sums.lanes
        while width > HALF_TILE:  # add the halves of all rows at once
            width //= 2
            each = width // HALF_TILE
            starts = [2 * each * row + lane for row in range(HALF_TILE) for lane in range(each)]
            low, high = (simd.take(builder, value, [start + more for start in starts]) for more in (0, each))
            value = builder.fadd(low, high)
        return value

    return Vector(types.float32, HALF_TILE)(sums), generate


@intrinsic
def multiply(typing_context, a, b):
    """a · b of fp32 vectors."""
    return a(a, a), lambda context, builder, signature, arguments: builder.fmul(*arguments)


@intrinsic(prefer_literal=True)
def every(typing_context, value, lanes):
    """A vector of one number."""

    def generate(context, builder, signature, arguments):
        return splat(builder, arguments[0], lanes.literal_value)

    return Vector(types.float32, lanes.literal_value)(value, lanes), generate


@cache
def multiply_stripe(integers: bool):
    """The function that sets `sums` [16] to the product of one tile row with `x[vector]`, prepared.

    `tile_scales[vector]` multiplies the scales of each tile, `tile_sums[vector]` is the sum of its activations.
    """
    multiply_tile = multiply_half_int8 if integers else multiply_half

    @numba.njit(inline="always")
    def multiply_stripe(words, tall, x, tile_scales, tile_sums, vector, scales, zero_points, sums):
        wide = words.shape[1]
        upper, lower, offsets = zeros(HALF_LANES), zeros(HALF_LANES), zeros(TILE)
        for start in range(0, wide, TILES_AT_ONCE):
            end = min(start + TILES_AT_ONCE, wide)
            at, place = (tall * wide + start) * TILE, 0
            for tile in range(start, end):
                prefetch(words, at + AHEAD)
                prefetch(words, at + AHEAD + 8)
                statistics(words, at, scales, zero_points, place)
                found = load(scales, place, TILE)
                products = multiply(found, load(zero_points, place, TILE))
                offsets = fma(products, every(tile_sums[vector, tile], TILE), offsets)
                if integers:
                    store(scales, place, multiply(found, every(tile_scales[vector, tile], TILE)))
                at += TILE
                place += TILE
            at, place, column = (tall * wide + start) * TILE, 0, vector * x.shape[1] + TILE * start
            for _ in range(start, end):
                upper = multiply_tile(words, at, scales, place, x, column, upper)
                at += TILE
                place += TILE
                column += TILE
            at, place = (tall * wide + start) * TILE + HALF_TILE, HALF_TILE
            column = vector * x.shape[1] + TILE * start
            for _ in range(start, end):
                lower = multiply_tile(words, at, scales, place, x, column, lower)
                at += TILE
                place += TILE
                column += TILE
        store(scales, 0, offsets)
        store(sums, 0, row_sums(upper))
        store(sums, HALF_TILE, row_sums(lower))
        for row in range(TILE):
            sums[row] -= scales[row // HALF_TILE * HALF_TILE + stored_at(row % HALF_TILE)]

    return multiply_stripe


@numba.njit(inline="always")
def stored_at(row):
    """`ORDER.index(row)`: the middle pairs change places."""
    return row + 2 if row // 2 == 1 else (row - 2 if row // 2 == 2 else row)


@cache
def product(integers: bool, storage: str, bits: int):
    """The compiled function that sets `y[vector, row]` to the product with the weights and outliers of tile rows.

    `x` is fp32 and padded; `prepared`, `tile_scales` and `tile_sums` are what `prepare` or `prepare_int8` makes of it.
    """
    multiply_dense, add_outliers = multiply_stripe(integers), csr.add_product(storage, bits)

    @numba.njit(**COMPILE)
    def product(words, offsets, col_vals, x, prepared, tile_scales, tile_sums, y, first, last):
        scales = np.empty(TILE * TILES_AT_ONCE, np.float32)
        zero_points, sums = np.empty_like(scales), np.empty(TILE, np.float32)
        for tall in range(first, last):
            rows = min(TILE, y.shape[1] - TILE * tall)
            for vector in range(len(x)):
                multiply_dense(words, tall, prepared, tile_scales, tile_sums, vector, scales, zero_points, sums)
                add_outliers(offsets, col_vals, tall, rows, x, vector, sums)
                for row in range(rows):
                    y[vector, TILE * tall + row] = sums[row]

    return product


@numba.njit(**COMPILE)
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


@numba.njit(**COMPILE)
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


_four_rows = multiply_rows(LANES_TO_FLOAT32[torch.float32], TO_FLOAT32[torch.float32])


@numba.njit(inline="always")
def multiply_decoded(dense, x, sums):
    """Set `sums[vector]` [16] to the product of sixteen dense rows of whole lanes with each `x[vector]`."""
    bits = dense.view(np.uint32)
    for row in range(0, TILE, ROWS):
        _four_rows(bits, row, ROWS, x, sums, row)

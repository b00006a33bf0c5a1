"""Vectors rounded to 8 bits for products with blocks, as ggml rounds them: `quantize_row_q8_K`, `_q8_0` and `_q8_1`.

A code is the nearest integer to 127 · x / largest, where `largest` is the largest magnitude of a block. Products are
the same as with ggml's own blocks; what lies beside the codes is what the kernels here read.
"""

from functools import cache

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from toolkit.kernels.engine import simd
from toolkit.kernels.engine.compiled import compiled
from toolkit.kernels.engine.elements import as_float32, float16_bits, float32_from_float16
from toolkit.kernels.engine.simd import F32, I8, I32, Vector, call, constant, in_all_lanes, take

WIDE, NARROW = 256, 32  # columns of a block
LANES = 64  # columns of a wide block that are rounded together
PART = 16  # columns of a wide block that share a sum
STEPS = numba.float32(127)
# added to a number below 2^22, it leaves the nearest integer in the lowest bits
TO_INTEGER, INTEGER_BITS, ZERO = float(3 << 22), (1 << 23) - 1, 1 << 22


@intrinsic(prefer_literal=True)
def magnitude_bits(typing_context, x, at, lanes):
    """The largest of the magnitudes from `at` on, as bits: of NaN and infinities they are above those of numbers."""

    def generate(context, builder, signature, arguments):
        count = lanes.literal_value
        kind = ir.VectorType(I32, count)
        bits = builder.load(simd.pointer(context, builder, x, *arguments[:2], kind), align=4)
        bits = builder.and_(bits, constant(kind, 0x7FFFFFFF))
        return call(builder, f"vector.reduce.umax.v{count}i32", I32, bits)

    return types.uint32(x, types.int64, lanes), generate


@intrinsic(prefer_literal=True)
def round_lanes(typing_context, x, at, factor, codes, place, lanes):
    """Write the integers nearest to factor · x, from `at` on, to `codes` from `place` on, and return them."""
    count = lanes.literal_value

    def generate(context, builder, signature, arguments):
        kind, integers = ir.VectorType(F32, count), ir.VectorType(I32, count)
        given = builder.load(simd.pointer(context, builder, x, *arguments[:2], kind), align=4)
        scaled = builder.fmul(given, in_all_lanes(builder, arguments[2], count))
        found = builder.bitcast(builder.fadd(scaled, constant(kind, TO_INTEGER)), integers)
        found = builder.sub(builder.and_(found, constant(integers, INTEGER_BITS)), constant(integers, ZERO))
        short = builder.trunc(found, ir.VectorType(I8, count))
        builder.store(short, simd.pointer(context, builder, codes, *arguments[3:5], short.type), align=1)
        return found

    place = types.int64
    return Vector(types.int32, count)(x, place, types.float32, codes, place, lanes), generate


@intrinsic(prefer_literal=True)
def store_sums(typing_context, array, at, integers, width, factor):
    """Write the sum of each `width` integers, times a factor, from `at` on."""

    def generate(context, builder, signature, arguments):
        value, wide = arguments[2], width.literal_value
        while wide > 1:
            starts = range(0, value.type.count, wide)
            low = [start + lane for start in starts for lane in range(wide // 2)]
            high = [lane + wide // 2 for lane in low]
            value, wide = builder.add(take(builder, value, low), take(builder, value, high)), wide // 2
        by = builder.trunc(arguments[4], I32)
        value = builder.mul(value, in_all_lanes(builder, by, value.type.count))
        kind = ir.VectorType(context.get_value_type(array.dtype), value.type.count)
        value = value if kind == value.type else builder.trunc(value, kind)
        builder.store(value, simd.pointer(context, builder, array, *arguments[:2], kind), align=1)
        return context.get_dummy_value()

    return types.void(array, types.int64, integers, width, types.int64), generate


@compiled
def prepare_wide(x, codes, scales, sums):
    """Round x, fp32 [vectors, columns], in blocks of 256: codes, a scale for each, and the sums of 16 codes each."""
    for block in range(scales.size):
        start, bits = WIDE * block, numba.uint32(0)
        for at in range(start, start + WIDE, LANES):
            bits = max(bits, magnitude_bits(x, at, LANES))
        largest = as_float32(bits)
        factor = STEPS / largest if largest > 0 else numba.float32(0)
        for at in range(start, start + WIDE, LANES):
            store_sums(sums, at // PART, round_lanes(x, at, factor, codes, at, LANES), PART, 1)
        scales.flat[block] = numba.float32(1) / factor if largest > 0 else largest


@cache
def narrow(offset: int):
    """The function that rounds x in blocks of 32: codes, a scale for each, and −offset times the sum of 4 codes each.

    Columns behind the last one of x must be zero in all three.
    """

    @compiled
    def prepare_narrow(x, codes, scales, starts):
        for vector in range(len(x)):
            for block in range(x.shape[1] // NARROW):
                at, place = vector * x.shape[1] + NARROW * block, vector * codes.shape[1] + NARROW * block
                largest = as_float32(magnitude_bits(x, at, NARROW))
                factor = STEPS / largest if largest > 0 else numba.float32(0)
                store_sums(starts, place // 4, round_lanes(x, at, factor, codes, place, NARROW), 4, -offset)
                scales[vector, block] = float32_from_float16(float16_bits(largest / STEPS))

    return prepare_narrow


@compiled
def prepare_with_sums(x, codes, scales, sums):
    """The same with the sum of each block's rounded numbers, which is rounded to fp16 itself."""
    found = sums.view(np.int32)
    for vector in range(len(x)):
        for block in range(x.shape[1] // NARROW):
            at, place = vector * x.shape[1] + NARROW * block, vector * codes.shape[1] + NARROW * block
            largest = as_float32(magnitude_bits(x, at, NARROW))
            factor, scale = STEPS / largest if largest > 0 else numba.float32(0), largest / STEPS
            store_sums(found, place // NARROW, round_lanes(x, at, factor, codes, place, NARROW), NARROW, 1)
            scales[vector, block] = float32_from_float16(float16_bits(scale))
            sums[vector, block] = float32_from_float16(float16_bits(scale * numba.float32(found[vector, block])))

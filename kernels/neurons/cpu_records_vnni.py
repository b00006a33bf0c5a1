"""The FFN of quantised neurons for CPUs with AVX-512 and VNNI: gate and up rows meet activations of 16 bits.

64 consecutive activations share a scale; rounding errs by at most 2⁻¹⁶ of the greatest of them. An activation is two
signed bytes, 256 · high + low, and `vpdpbusd` multiplies 64 codes by 64 bytes and adds. The codes of a block are copied
once for each shift that they need, so a shift, an AND and two `vpdpbusd` serve 64 weights. The product of a row is
Σ factor · (Σ code · x) + Σ addend · (Σ x), over groups. Down columns are added in fp32, as `cpu_records_simd` does.
"""

from functools import cache

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from toolkit.kernels.common import simd
from toolkit.kernels.common.products import NEAR_BYTES
from toolkit.kernels.common.simd import Vector, fma, load, prefetch, prefetch_l2, total, zeros
from toolkit.kernels.neurons.cpu_records import section_start
from toolkit.kernels.neurons.cpu_records_simd import (
    FLOATS,
    INTS,
    VECTORS,
    add_columns_of,
    fill_room,
    padded,
    request_section,
    weights_at_once,
)
from toolkit.kernels.neurons.records import BLOCK, FIELDS, LANES, codes_start, group_of, groups
from toolkit.kernels.neurons.shared import ROWS, ffn_of_parts
from toolkit.kernels.runtime.compiled import compiled

LARGEST = 127 * 256  # of an activation in two signed bytes
BYTES = ir.VectorType(ir.IntType(8), BLOCK)


@cache
def block_codes(bits: int):
    """The intrinsic that gives the 64 codes of a block, a byte each, in the order of `column_of`."""
    count = 8 * bits  # bytes
    copies = BLOCK // count

    @intrinsic
    def block_codes(typing_context, numbers, at):
        def generate(context, builder, signature, arguments):
            given = ir.VectorType(ir.IntType(8), count)
            source = simd.pointer(context, builder, numbers, *arguments, given)
            words = simd.take(builder, builder.load(source, align=1), [*range(count)] * copies)
            shifts = ir.Constant(INTS, [bits * (lane * copies // LANES) for lane in range(LANES)])
            moved = builder.bitcast(builder.lshr(builder.bitcast(words, INTS), shifts), BYTES)
            return builder.and_(moved, ir.Constant(BYTES, [2**bits - 1] * BLOCK))

        return Vector(types.uint8, BLOCK)(numbers, types.int64), generate

    return block_codes


@numba.njit(inline="always")
def column_of(byte, bits):
    """The weight of the block whose code is this byte of `block_codes`."""
    if bits == 4:  # a 16-bit number's fields 0 and 2, or with the shift 1 and 3, are its two bytes
        return byte % 32 // 2 + 32 * (byte % 2) + 16 * (byte // 32)
    return byte


@intrinsic
def dot_codes(typing_context, codes, planes, at):
    """Sums of four products of codes and activations each, in units of these, as fp32."""

    def generate(context, builder, signature, arguments):
        codes_value, data, place = arguments
        high = simd.pointer(context, builder, planes, data, place, BYTES)
        given = [builder.load(builder.gep(high, [simd.I64(plane)]), align=1) for plane in range(2)]
        kind = ir.FunctionType(INTS, [INTS] * 3)
        multiply = builder.module.declare_intrinsic("llvm.x86.avx512.vpdpbusd.512", (), kind)
        four, (high, low) = builder.bitcast(codes_value, INTS), (builder.bitcast(plane, INTS) for plane in given)
        products = builder.call(multiply, [ir.Constant(INTS, None), four, high])
        products = builder.shl(products, ir.Constant(INTS, [8] * LANES))
        return builder.sitofp(builder.call(multiply, [products, four, low]), FLOATS)

    return Vector(types.float32, LANES)(codes, planes, types.int64), generate


@cache
def block_factors(bits: int):
    """The intrinsic that gives the factors of a block's groups, for the lanes of `dot_codes`."""
    of_block = 1 if bits == 4 else FIELDS

    @intrinsic
    def block_factors(typing_context, room, at):
        def generate(context, builder, signature, arguments):
            some = ir.VectorType(ir.FloatType(), of_block)
            source = simd.pointer(context, builder, room, *arguments, some)
            return simd.take(
                builder, builder.load(source, align=4), [lane * of_block // LANES for lane in range(LANES)]
            )

        return Vector(types.float32, LANES)(room, types.int64), generate

    return block_factors


@intrinsic
def times(typing_context, a, b):
    """The product, lane by lane."""
    return a(a, a), lambda context, builder, signature, arguments: builder.fmul(*arguments)


@cache
def prepared(bits: int):
    """The function that writes activations as bytes, two planes a block, the blocks' scales and the groups' sums."""
    group = group_of(bits)

    @compiled
    def prepared(x, planes, scales, sums):
        for vector in range(len(x)):
            for block in range(x.shape[1] // BLOCK):
                first, greatest = block * BLOCK, np.float32(0)
                for column in range(first, first + BLOCK):
                    size = abs(x[vector, column])
                    if not size <= greatest:  # a NaN stays
                        greatest = size
                        if size != size:
                            break
                scale = greatest / np.float32(LARGEST)
                finite = greatest > 0 and greatest < np.inf
                unit = np.float32(LARGEST) / greatest if finite else np.float32(0)
                for column in range(first, first + BLOCK, group):
                    sums[vector, column // group] = np.float32(0)
                scales[vector, block * LANES : (block + 1) * LANES] = scale
                for byte in range(BLOCK):
                    column = first + column_of(byte, bits)
                    rounded = np.int32(np.rint(x[vector, column] * unit)) if finite else np.int32(0)
                    high = (rounded + 128) >> 8
                    planes[vector, 2 * first + byte] = high
                    planes[vector, 2 * first + BLOCK + byte] = rounded - 256 * high
                    sums[vector, column // group] += scale * np.float32(rounded)

    return prepared


@cache
def multiply_rows(bits: int):
    """The function that multiplies rows, as `ffn_of_parts` describes it."""
    codes_of, factors_of, fill = block_codes(bits), block_factors(bits), fill_room(bits)
    block_bytes, of_block, line = weights_at_once(bits)

    @numba.njit(inline="always")
    def offset(room, place, sums, vector, hidden):
        products = zeros(LANES)
        for first in range(0, groups(hidden, bits), LANES):
            products = fma(
                load(room, place + first, LANES), load(sums, vector * sums.shape[1] + first, LANES), products
            )
        return products

    @numba.njit(inline="always")
    def add(codes, factors, planes, scales, vector, block, sums):
        dots = dot_codes(codes, planes, vector * planes.shape[1] + 2 * BLOCK * block)
        return fma(dots, times(factors, load(scales, vector * scales.shape[1] + LANES * block, LANES)), sums)

    @compiled
    def multiply_four(numbers, at, stride, room, prepared, vector, hidden, y, place):
        planes, scales, sums = prepared
        wide, start = padded(hidden, bits), at + codes_start(hidden, bits)
        a, b, c, d = start, start + stride, start + 2 * stride, start + 3 * stride
        of_a, of_b = offset(room, wide, sums, vector, hidden), offset(room, 3 * wide, sums, vector, hidden)
        of_c, of_d = offset(room, 5 * wide, sums, vector, hidden), offset(room, 7 * wide, sums, vector, hidden)
        group = 0
        for block in range(hidden // BLOCK):
            if block * BLOCK % line == 0:
                for row in (a, b, c, d):
                    prefetch_l2(numbers, row + ROWS * stride)
                    prefetch(numbers, row + NEAR_BYTES)
            of_a = add(codes_of(numbers, a), factors_of(room, group), planes, scales, vector, block, of_a)
            of_b = add(codes_of(numbers, b), factors_of(room, group + 2 * wide), planes, scales, vector, block, of_b)
            of_c = add(codes_of(numbers, c), factors_of(room, group + 4 * wide), planes, scales, vector, block, of_c)
            of_d = add(codes_of(numbers, d), factors_of(room, group + 6 * wide), planes, scales, vector, block, of_d)
            a, b, c, d = a + block_bytes, b + block_bytes, c + block_bytes, d + block_bytes
            group += of_block
        y[vector, place], y[vector, place + 1] = total(of_a), total(of_b)
        y[vector, place + 2], y[vector, place + 3] = total(of_c), total(of_d)

    @compiled
    def multiply_one(numbers, at, stride, room, first, prepared, vector, hidden, y, place):
        planes, scales, sums = prepared
        wide, a = padded(hidden, bits), at + codes_start(hidden, bits)
        found, group = offset(room, first + wide, sums, vector, hidden), first
        for block in range(hidden // BLOCK):
            if block * BLOCK % line == 0:
                prefetch_l2(numbers, a + stride)
                prefetch(numbers, a + NEAR_BYTES)
            found = add(codes_of(numbers, a), factors_of(room, group), planes, scales, vector, block, found)
            a, group = a + block_bytes, group + of_block
        y[vector, place] = total(found)

    @compiled
    def multiply_vectors(numbers, at, stride, room, first, prepared, vector, hidden, y, place):
        planes, scales, sums = prepared
        wide, a, group = padded(hidden, bits), at + codes_start(hidden, bits), first
        shifts = first + wide
        of_a, of_b = offset(room, shifts, sums, vector, hidden), offset(room, shifts, sums, vector + 1, hidden)
        of_c, of_d = offset(room, shifts, sums, vector + 2, hidden), offset(room, shifts, sums, vector + 3, hidden)
        for block in range(hidden // BLOCK):
            if block * BLOCK % line == 0:
                prefetch_l2(numbers, a + stride)
                prefetch(numbers, a + NEAR_BYTES)
            codes, factors = codes_of(numbers, a), factors_of(room, group)
            of_a = add(codes, factors, planes, scales, vector, block, of_a)
            of_b = add(codes, factors, planes, scales, vector + 1, block, of_b)
            of_c = add(codes, factors, planes, scales, vector + 2, block, of_c)
            of_d = add(codes, factors, planes, scales, vector + 3, block, of_d)
            a, group = a + block_bytes, group + of_block
        y[vector, place], y[vector + 1, place] = total(of_a), total(of_b)
        y[vector + 2, place], y[vector + 3, place] = total(of_c), total(of_d)

    @compiled
    def multiply(given, at, stride, rows, x, y, place):
        numbers, room, prepared = given
        hidden, wide = x.shape[1], padded(x.shape[1], bits)
        for i in range(rows):
            fill(numbers, at + i * stride, hidden, room, 2 * i * wide)
        vector = 0
        while vector + VECTORS <= len(x):
            for i in range(rows):
                row, first = at + i * stride, 2 * i * wide
                multiply_vectors(numbers, row, stride, room, first, prepared, vector, hidden, y, place + i)
            vector += VECTORS
        while vector < len(x):
            if rows == ROWS:
                multiply_four(numbers, at, stride, room, prepared, vector, hidden, y, place)
            else:
                for i in range(rows):
                    row, first = at + i * stride, 2 * i * wide
                    multiply_one(numbers, row, stride, room, first, prepared, vector, hidden, y, place + i)
            vector += 1

    return multiply


@cache
def ffn(bits: int, activation: str):
    """The function of parts, as `ffn_of_parts` describes it."""
    write = prepared(bits)

    @numba.njit(inline="always")
    def prepare(rows, x):
        vectors, hidden = x.shape
        wide = padded(hidden, bits)
        planes = np.empty((vectors, 2 * hidden), np.int8)
        scales, sums = np.empty((vectors, hidden // BLOCK * LANES), np.float32), np.zeros((vectors, wide), np.float32)
        write(x, planes, scales, sums)
        return rows.reshape(-1), np.empty(2 * ROWS * wide, np.float32), (planes, scales, sums)

    functions = multiply_rows(bits), add_columns_of(bits, True)
    return ffn_of_parts(*functions, activation, True, section_start(bits), prepare, request_section(bits))

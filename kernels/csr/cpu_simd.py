"""Outliers for CPUs with SIMD: along a row for CSR, across sixteen rows for PTCSR."""

from functools import cache

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from toolkit.kernels.csr.shared import BLOCK, column, span, value, within
from toolkit.kernels.engine import simd
from toolkit.kernels.engine.compiled import compiled
from toolkit.kernels.engine.simd import F16, F32, I16, I32, I64, Vector, fma, load, store, total, zeros

LANES = 8  # words of a CSR row that are taken at once


@intrinsic(prefer_literal=True)
def weights_of(typing_context, words, bits):
    """The fp16 values of a vector of words, as fp32."""
    lanes, above = words.lanes, bits.literal_value

    def generate(context, builder, signature, arguments):
        value = builder.lshr(arguments[0], simd.constant(arguments[0].type, above))
        halves = builder.bitcast(builder.trunc(value, ir.VectorType(I16, lanes)), ir.VectorType(F16, lanes))
        return builder.fpext(halves, ir.VectorType(F32, lanes))

    return Vector(types.float32, lanes)(words, bits), generate


@intrinsic(prefer_literal=True)
def gather(typing_context, x, base, last, words, bits):
    """`x.flat[base + column]` for the column of every word. A column above `last` counts as `last`."""
    lanes, width = words.lanes, bits.literal_value

    def generate(context, builder, signature, arguments):
        array, base, last, words = arguments[:4]
        origin = simd.pointer(context, builder, x, array, base, F32)
        columns = builder.and_(words, simd.constant(words.type, (1 << width) - 1))
        last = last if words.type.element == I64 else builder.trunc(last, words.type.element)
        limit = simd.in_all_lanes(builder, last, lanes)
        columns = builder.select(builder.icmp_unsigned("<", columns, limit), columns, limit)
        found = ir.Constant(ir.VectorType(F32, lanes), ir.Undefined)
        for lane, at in enumerate(_each(builder, columns)):
            found = builder.insert_element(found, builder.load(builder.gep(origin, [at])), I32(lane))
        return found

    return Vector(types.float32, lanes)(x, types.int64, types.int64, words, bits), generate


def _each(builder, numbers) -> list[ir.Value]:
    """The unsigned numbers of a vector, in 64 bits each. Two of 32 bits leave the vector's register together."""
    pairs = builder.bitcast(numbers, ir.VectorType(I64, numbers.type.count * numbers.type.element.width // 64))
    found = [builder.extract_element(pairs, I32(number)) for number in range(pairs.type.count)]
    if numbers.type.element == I64:
        return found
    kind = ir.FunctionType(I64, [I64])  # LLVM, which knows these parts, would take them from the vector one by one
    found = [builder.asm(kind, "", "=r,0", [pair], side_effect=False) for pair in found]
    return [part for pair in found for part in (builder.and_(pair, I64((1 << 32) - 1)), builder.lshr(pair, I64(32)))]


@intrinsic
def without(typing_context, vector, number):
    """The vector with zeros in so many lanes, the first."""

    def generate(context, builder, signature, arguments):
        numbers = ir.Constant(ir.VectorType(I64, vector.lanes), list(range(vector.lanes)))
        kept = builder.icmp_signed(">=", numbers, simd.in_all_lanes(builder, arguments[1], vector.lanes))
        return builder.select(kept, arguments[0], ir.Constant(arguments[0].type, None))

    return vector(vector, types.int64), generate


@cache
def add_product(storage: str, bits: int):
    """The function that adds a block's outliers, times `x[vector]`, to `sums` [16]; `bits` tell a word's column."""
    where = span(storage)

    @compiled
    def along(offsets, words, block, rows, x, vector, sums):
        for row in range(rows):
            first, end, _ = where(offsets, block, row, len(words) if x.shape[1] else 0)
            whole = first + (end - first) // LANES * LANES
            lanes = zeros(LANES)
            for at in range(first, whole, LANES):
                some = load(words, at, LANES)
                lanes = fma(weights_of(some, bits), gather(x, vector * x.shape[1], x.shape[1] - 1, some, bits), lanes)
            if whole < end and end >= LANES:  # the row's last words, behind some that are done or of earlier rows
                some = load(words, end - LANES, LANES)
                weights = without(weights_of(some, bits), whole - (end - LANES))
                lanes = fma(weights, gather(x, vector * x.shape[1], x.shape[1] - 1, some, bits), lanes)
                whole = end
            found = total(lanes)
            for at in range(whole, end):
                found += value(words[at], bits) * x[vector, min(column(words[at], bits), x.shape[1] - 1)]
            sums[row] += found

    @compiled
    def across(offsets, words, block, rows, x, vector, sums):
        lanes = load(sums, 0, BLOCK)
        first, end = within(offsets[block], offsets[block + 1], len(words) if x.shape[1] else 0)
        for at in range(first, end - BLOCK + 1, BLOCK):
            some = load(words, at, BLOCK)
            lanes = fma(weights_of(some, bits), gather(x, vector * x.shape[1], x.shape[1] - 1, some, bits), lanes)
        store(sums, 0, lanes)

    return along if storage == "csr" else across

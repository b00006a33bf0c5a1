"""Outliers for CPUs with SIMD: along a row for CSR, across sixteen rows for PTCSR.

Words and offsets come from files: no contents make a kernel touch memory outside of the tensors.
"""

from functools import cache

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from toolkit.kernels.csr.shared import BLOCK, column, span, value, within
from toolkit.kernels.engine import simd
from toolkit.kernels.engine.compiled import compiled
from toolkit.kernels.engine.simd import I64, Vector, fma, load, store, total, zeros

LANES = 8  # words of a CSR row that are taken at once


@intrinsic(prefer_literal=True)
def weights_of(typing_context, words, bits):
    """The fp16 values of a vector of words, as fp32."""
    lanes, above = words.lanes, bits.literal_value

    def generate(context, builder, signature, arguments):
        value = builder.lshr(arguments[0], ir.Constant(arguments[0].type, [above] * lanes))
        halves = builder.bitcast(
            builder.trunc(value, ir.VectorType(ir.IntType(16), lanes)), _lanes(ir.HalfType(), lanes)
        )
        return builder.fpext(halves, _lanes(ir.FloatType(), lanes))

    return Vector(types.float32, lanes)(words, bits), generate


@intrinsic(prefer_literal=True)
def gather(typing_context, x, base, last, words, bits):
    """`x.flat[base + column]` for the column of every word. A column above `last` counts as `last`."""
    lanes, width = words.lanes, bits.literal_value

    def generate(context, builder, signature, arguments):
        array, base, last, words = arguments[:4]
        origin = simd.pointer(context, builder, x, array, base, ir.FloatType())
        columns = builder.and_(words, ir.Constant(words.type, [(1 << width) - 1] * lanes))
        limit = ir.Constant(words.type, ir.Undefined)
        for lane in range(lanes):
            one = last if words.type.element == I64 else builder.trunc(last, words.type.element)
            limit = builder.insert_element(limit, one, simd.I32(lane))
        columns = builder.select(builder.icmp_unsigned("<", columns, limit), columns, limit)
        found = ir.Constant(_lanes(ir.FloatType(), lanes), ir.Undefined)
        for lane in range(lanes):
            column = builder.extract_element(columns, simd.I32(lane))
            at = column if column.type == I64 else builder.zext(column, I64)
            found = builder.insert_element(found, builder.load(builder.gep(origin, [at])), simd.I32(lane))
        return found

    return Vector(types.float32, lanes)(x, types.int64, types.int64, words, bits), generate


@cache
def add_product(storage: str, bits: int):
    """The function that adds a block's outliers, times `x[vector]`, to `sums` [16]; `bits` tell a word's column."""
    where = span(storage)

    @compiled
    def along(offsets, words, block, rows, x, vector, sums):
        for row in range(rows):
            first, end, _ = where(offsets, block, row)
            first, end = within(first, end, len(words) if x.shape[1] else 0)
            whole = first + (end - first) // LANES * LANES
            lanes = zeros(LANES)
            for at in range(first, whole, LANES):
                some = load(words, at, LANES)
                lanes = fma(weights_of(some, bits), gather(x, vector * x.shape[1], x.shape[1] - 1, some, bits), lanes)
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


def _lanes(kind: ir.Type, lanes: int) -> ir.VectorType:
    return ir.VectorType(kind, lanes)

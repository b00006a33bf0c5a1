"""Outliers for CPUs with SIMD: along a row for CSR, across sixteen rows for PTCSR."""

from functools import cache

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from toolkit.kernels.common import simd
from toolkit.kernels.common.compiled import compiled
from toolkit.kernels.common.simd import I64, Vector, fma, load, store, total, zeros
from toolkit.kernels.csr.shared import BLOCK, column, span, value

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
def gather(typing_context, x, base, words, bits):
    """`x.flat[base + column]` for the column of every word."""
    lanes, width = words.lanes, bits.literal_value

    def generate(context, builder, signature, arguments):
        array, base, words = arguments[:3]
        origin = simd.pointer(context, builder, x, array, base, ir.FloatType())
        found = ir.Constant(_lanes(ir.FloatType(), lanes), ir.Undefined)
        for lane in range(lanes):
            word = builder.extract_element(words, simd.I32(lane))
            column = builder.and_(word, ir.Constant(word.type, (1 << width) - 1))
            at = column if column.type == I64 else builder.zext(column, I64)
            found = builder.insert_element(found, builder.load(builder.gep(origin, [at])), simd.I32(lane))
        return found

    return Vector(types.float32, lanes)(x, types.int64, words, bits), generate


@cache
def add_product(storage: str, bits: int):
    """The function that adds a block's outliers, times `x[vector]`, to `sums` [16]; `bits` tell a word's column."""
    where = span(storage)

    @compiled
    def along(offsets, words, block, rows, x, vector, sums):
        for row in range(rows):
            first, end, _ = where(offsets, block, row)
            whole = first + (end - first) // LANES * LANES
            lanes = zeros(LANES)
            for at in range(first, whole, LANES):
                some = load(words, at, LANES)
                lanes = fma(weights_of(some, bits), gather(x, vector * x.shape[1], some, bits), lanes)
            found = total(lanes)
            for at in range(whole, end):
                found += value(words[at], bits) * x[vector, column(words[at], bits)]
            sums[row] += found

    @compiled
    def across(offsets, words, block, rows, x, vector, sums):
        lanes = load(sums, 0, BLOCK)
        for at in range(offsets[block], offsets[block + 1], BLOCK):
            some = load(words, at, BLOCK)
            lanes = fma(weights_of(some, bits), gather(x, vector * x.shape[1], some, bits), lanes)
        store(sums, 0, lanes)

    return along if storage == "csr" else across


def _lanes(kind: ir.Type, lanes: int) -> ir.VectorType:
    return ir.VectorType(kind, lanes)

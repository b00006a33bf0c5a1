"""Products with blocks for CPUs with AVX-512 and VNNI: sixteen lanes along a row, four columns in each.

Codes are unpacked to bytes in the order of their columns (`unpacking`), so a vector that is rounded once serves blocks
of all types. `vpdpbusd` multiplies unsigned codes with the vector's signed bytes and adds four products in each lane.
Codes that stand for signed numbers have an offset, which sums over the vector take off again; these sums are made once.

In wide blocks sums of two products fit 16 bits where codes have up to six: `vpmaddubsw` makes these, and `vpdpwssd`
multiplies them with the scales and adds.
"""

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from toolkit.kernels.blocks.activations import narrow, prepare_wide, prepare_with_sums
from toolkit.kernels.blocks.codebooks import CODEBOOKS, FEATURES
from toolkit.kernels.blocks.layout import LAYOUTS
from toolkit.kernels.blocks.unpacking import (
    BYTES,
    FLOATS,
    INTS,
    LANES,
    NARROW,
    OFFSETS,
    PARTS,
    REGISTER,
    SHORTS,
    WIDE,
    WIDTH,
    Wide,
)
from toolkit.kernels.engine import simd
from toolkit.kernels.engine.compiled import compiled
from toolkit.kernels.engine.parallel import Task
from toolkit.kernels.engine.products import store_rows
from toolkit.kernels.engine.simd import (
    CACHE_LINE,
    F32,
    I16,
    I32,
    I64,
    Vector,
    call,
    constant,
    in_all_lanes,
    join,
    multiply_add,
    take,
)

SHORT_PAIRS = ir.VectorType(I16, 2 * LANES)
AHEAD = 4096  # bytes: the hardware's own prefetching stops at the end of a page
READ = WIDE | (CODEBOOKS if all(map(simd.host_has, FEATURES)) else {})  # wide types, by what reads a block
TILE_BYTES = 16384  # of rows that meet some vectors before the next ones: both fit the first cache
AT_ONCE = 4  # vectors, which share unpacked codes; two of fewer


class Row(NamedTuple):
    """Where the rounded vectors of a product lie: pointers to rows of what `preparing` makes."""

    codes: ir.Value
    scales: ir.Value
    more: ir.Value


def _from(builder, row: ir.Value, at, kind: ir.Type) -> ir.Value:
    """The vector that begins at the element `at` of a row."""
    return builder.load(builder.bitcast(builder.gep(row, [at]), kind.as_pointer()), align=1)


def _multiply_wide(builder, wide: Wide, x: list[ir.Value], x_scale, x_sums, before) -> ir.Value:
    """Add the products of a block with a rounded vector to the sums `before`, in sixteen lanes."""
    sums = ir.Constant(INTS, None)
    if wide.signs:
        x = [_negated(builder, given, sign) for given, sign in zip(x, wide.signs, strict=True)]
    for number, (codes, given) in enumerate(zip(wide.codes, x, strict=True)):
        if wide.short:
            products = call(builder, "x86.avx512.pmaddubs.w.512", SHORT_PAIRS, codes, builder.bitcast(given, BYTES))
            products, scales = (builder.bitcast(value, INTS) for value in (products, _spread(builder, wide, number)))
            sums = call(builder, "x86.avx512.vpdpwssd.512", INTS, sums, products, scales)
        else:
            zero = ir.Constant(INTS, None)
            products = call(builder, "x86.avx512.vpdpbusd.512", INTS, zero, builder.bitcast(codes, INTS), given)
            scales = take(builder, builder.sext(wide.scales, INTS), [4 * number + lane // 4 for lane in range(LANES)])
            sums = builder.add(sums, builder.mul(products, scales))
    factor = in_all_lanes(builder, builder.fmul(wide.factor, x_scale), LANES)
    if wide.offset is None and wide.minima is None:
        return multiply_add(builder, builder.sitofp(sums, FLOATS), factor, before)
    taken_off = wide.scales if wide.minima is None else wide.minima
    taken_off = call(builder, "x86.avx2.pmadd.wd", ir.VectorType(I32, 8), taken_off, x_sums)
    taken_off = join(builder, [taken_off, ir.Constant(taken_off.type, None)])
    if wide.minima is None:
        sums = builder.sub(sums, builder.shl(taken_off, constant(INTS, wide.offset)))
    after = multiply_add(builder, builder.sitofp(sums, FLOATS), factor, before)
    if wide.minima is not None:
        factor = builder.fneg(in_all_lanes(builder, builder.fmul(wide.minimum_factor, x_scale), LANES))
        after = multiply_add(builder, builder.sitofp(taken_off, FLOATS), factor, after)
    return after


def _negated(builder, given: ir.Value, sign: ir.Value) -> ir.Value:
    """A vector's bytes, negated where a bit says so."""
    given = builder.bitcast(given, BYTES)
    return builder.bitcast(builder.select(sign, builder.neg(given), given), INTS)


def _spread(builder, wide: Wide, number: int) -> ir.Value:
    """The scales of a register of codes, 16 bits, one for each two columns.

    As a shuffle with known lanes LLVM would take the bytes first and widen them four times.
    """
    lanes = [4 * number + lane // 8 for lane in range(2 * LANES)]
    places = simd.in_register(builder, ir.Constant(SHORT_PAIRS, lanes))
    scales = join(builder, [wide.scales, ir.Constant(SHORTS, ir.Undefined)])
    return call(builder, "x86.avx512.permvar.hi.512", SHORT_PAIRS, scales, places)


def _add_wide(builder, name: str, block, unit, rows: Sequence[Row], sums: Sequence[ir.Value], blocks: int) -> None:
    """Add the products of a block with several vectors to the sums behind pointers; `unit` is its number in a row."""
    wide, first = READ[name](builder, block), builder.mul(unit, I64(WIDTH))
    for row, place in zip(rows, sums, strict=True):
        x = [_from(builder, row.codes, builder.add(first, I64(REGISTER * part)), INTS) for part in range(4)]
        x_scale = builder.load(builder.gep(row.scales, [unit]))
        x_sums = _from(builder, row.more, builder.mul(unit, I64(PARTS)), SHORTS)
        builder.store(_multiply_wide(builder, wide, x, x_scale, x_sums, builder.load(place)), place)


def _add_narrow(builder, name: str, block, unit, rows: Sequence[Row], sums: Sequence[ir.Value], blocks: int) -> None:
    """The same for two blocks of 32 columns, or for one that ends a row; `unit` is the number of the pair."""
    pair = [block, builder.gep(block, [I64(LAYOUTS[name].nbytes)]) if blocks == 2 else None]
    narrow, first, two = NARROW[name](builder, pair), builder.mul(unit, I64(2)), ir.VectorType(F32, 2)
    for row, place in zip(rows, sums, strict=True):
        x = _from(builder, row.codes, builder.mul(unit, I64(REGISTER)), INTS)
        start = ir.Constant(INTS, None)
        if narrow.minima is None:
            start = _from(builder, row.more, builder.mul(unit, I64(LANES)), INTS)
        products = builder.bitcast(narrow.codes, INTS)
        products = call(builder, "x86.avx512.vpdpbusd.512", INTS, start, products, x)
        factors = builder.fmul(narrow.factors, _from(builder, row.scales, first, two))
        factors = take(builder, factors, [0] * 8 + [1] * 8)
        after = multiply_add(builder, builder.sitofp(products, FLOATS), factors, builder.load(place))
        if narrow.minima is not None:
            more = builder.fmul(narrow.minima, _from(builder, row.more, first, two))
            lanes = ir.Constant(ir.VectorType(I32, LANES), [0, 1] + [2] * (LANES - 2))
            after = builder.fadd(after, builder.shuffle_vector(more, ir.Constant(two, None), lanes))
        builder.store(after, place)


@cache
def multiply_row(name: str):
    """The intrinsic that multiplies a row of blocks with so many vectors, from number `vector` on: fp32 [vectors].

    `codes`, `scales` and `more` are what `preparing` makes.
    """
    add, blocks = (_add_wide, 1) if name in READ else (_add_narrow, 2)
    nbytes = blocks * LAYOUTS[name].nbytes

    @intrinsic(prefer_literal=True)
    def multiply_row(typing_context, data, row, codes, scales, more, vector, vectors):
        count = vectors.literal_value

        def generate(context, builder, signature, arguments):
            begins = row_pointer(context, builder, signature, arguments, 0, arguments[1])
            of_vectors = [builder.add(arguments[5], I64(number)) for number in range(count)]
            rows = [
                Row(*(row_pointer(context, builder, signature, arguments, k, v) for k in (2, 3, 4))) for v in of_vectors
            ]
            sums = [cgutils.alloca_once(builder, FLOATS) for _ in rows]
            for place in sums:
                builder.store(ir.Constant(FLOATS, None), place)
            row_bytes = second_size(builder, arguments[0])
            units = builder.udiv(row_bytes, I64(nbytes))
            with cgutils.for_range(builder, units, intp=I64) as loop:
                block = builder.gep(begins, [builder.mul(loop.index, I64(nbytes))])
                for line in range(0, nbytes, CACHE_LINE):
                    ahead = builder.gep(block, [I64(AHEAD + line)])
                    call(builder, "prefetch.p0", ir.VoidType(), ahead, I32(0), I32(3), I32(1))
                add(builder, name, block, loop.index, rows, sums, blocks)
            if blocks > 1:
                done = builder.mul(units, I64(nbytes))
                with builder.if_then(builder.icmp_unsigned("<", done, row_bytes)):
                    add(builder, name, builder.gep(begins, [done]), units, rows, sums, 1)
            return simd.halved(builder, join(builder, [builder.load(place) for place in sums]), LANES)

        place = types.int64
        return Vector(types.float32, count)(data, place, codes, scales, more, place, vectors), generate

    return multiply_row


def second_size(builder, array: ir.Value) -> ir.Value:
    """The second size of an array's."""
    return builder.extract_value(builder.extract_value(array, 5), 1)


def row_pointer(context, builder, signature, arguments, number: int, row) -> ir.Value:
    """A pointer to a row of the argument of this number."""
    kind = context.get_value_type(signature.args[number].dtype)
    at = builder.mul(row, second_size(builder, arguments[number]))
    return simd.pointer(context, builder, signature.args[number], arguments[number], at, kind)


@cache
def product(name: str):
    """The compiled function that sets `y[vector, row]` to the products of rows of blocks with prepared vectors.

    The sums of a vector are the same, to the bit, however many vectors there are.
    """
    multiply = multiply_row(name)

    @compiled
    def product(data, codes, scales, more, y, first, last):
        vectors, rows = y.shape
        fours, twos, some = vectors // AT_ONCE * AT_ONCE, vectors // 2 * 2, max(1, TILE_BYTES // data.shape[1])
        for begin in range(first, last, some):
            tile = range(begin, min(begin + some, last))
            for vector in range(0, fours, AT_ONCE):
                for row in tile:
                    sums = multiply(data, row, codes, scales, more, vector, AT_ONCE)
                    store_rows(y, vector * rows + row, rows, sums, 1)
            for vector in range(fours, twos, 2):
                for row in tile:
                    store_rows(y, vector * rows + row, rows, multiply(data, row, codes, scales, more, vector, 2), 1)
            for vector in range(twos, vectors):
                for row in tile:
                    store_rows(y, vector * rows + row, rows, multiply(data, row, codes, scales, more, vector, 1), 1)

    return product


def knows(name: str) -> bool:
    """Whether there are kernels for a type."""
    return name in READ or name in NARROW


def rounding(name: str) -> str:
    """The name of the way that vectors are rounded for a type; types of one way share prepared vectors."""
    return "wide" if name in READ else f"narrow {OFFSETS.get(name)}"


def preparing(name: str, x: np.ndarray) -> Task:
    """The task that prepares vectors, fp32 [vectors, columns], for a type: its last arguments are what products take.

    Columns that no block fills are padded with zeros.
    """
    vectors, columns = x.shape
    if name in READ:
        scales, sums = np.empty((vectors, columns // WIDTH), np.float32), np.empty((vectors, columns // 16), np.int16)
        return Task(prepare_wide, (x, np.empty((vectors, columns), np.int8), scales, sums))
    padded = -(-columns // REGISTER) * REGISTER
    codes, scales = np.zeros((vectors, padded), np.int8), np.zeros((vectors, padded // 32), np.float32)
    if name in OFFSETS:
        return Task(narrow(OFFSETS[name]), (x, codes, scales, np.zeros((vectors, padded // 4), np.int32)))
    return Task(prepare_with_sums, (x, codes, scales, np.zeros_like(scales)))

"""Products with blocks for CPUs with AVX-512, VBMI and VNNI: sixteen lanes along a row, four columns in each.

Codes are unpacked to bytes in the order of their columns, so a vector that is rounded once serves blocks of all types.
`vpdpbusd` multiplies unsigned codes with the vector's signed bytes and adds four products in each lane. Codes that
stand for signed numbers have an offset, which sums over the vector take off again; these sums are made once.

`WIDE` are the types of 256 columns, with scales for every 16 or 32 of them: sums of four products fit 16 bits, so
`vpdpwssd` multiplies them with the scales and adds. `NARROW` are those of 32 columns, which are taken two at a time.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from toolkit.kernels.blocks.activations import narrow, prepare_wide, prepare_with_sums
from toolkit.kernels.blocks.layout import LAYOUTS
from toolkit.kernels.engine import simd
from toolkit.kernels.engine.compiled import compiled
from toolkit.kernels.engine.parallel import Task
from toolkit.kernels.engine.products import store_rows
from toolkit.kernels.engine.simd import (
    CACHE_LINE,
    F16,
    F32,
    I8,
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

AHEAD = 4096  # bytes: the hardware's own prefetching stops at the end of a page
AT_ONCE = 4  # vectors, which share unpacked codes; two of fewer
LANES, REGISTER = 16, 64  # of 32 bits, and bytes
WIDTH = 256  # columns of a wide block
PARTS = 16  # of a wide block, of as many columns; each has a scale
BYTES, HALF_BYTES, QUARTER = (ir.VectorType(I8, lanes) for lanes in (64, 32, 16))
SHORTS, INTS, FLOATS = ir.VectorType(I16, 16), ir.VectorType(I32, LANES), ir.VectorType(F32, LANES)
LOW, HIGH = 0x0F, 0x30
# what the four bits of IQ4_NL and IQ4_XS stand for, and twice what those of MXFP4 do
NON_LINEAR = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113]
E2M1 = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12]
POWERS = [2.0 ** (exponent - 128) for exponent in range(256)]


class Wide(NamedTuple):
    """A block of 256 columns in registers: it is factor · scale · (code − 2^offset) − minimum_factor · minimum.

    There is an offset or a minimum. Without a `minimum_factor` and an offset nothing is taken off.
    """

    codes: Sequence[ir.Value]  # four registers of unsigned bytes
    scales: ir.Value  # of 16 columns each, 16 bits
    factor: ir.Value
    offset: int | None = None  # its binary logarithm
    minima: ir.Value | None = None  # as scales
    minimum_factor: ir.Value | None = None
    short: bool = True  # whether sums of four products fit 16 bits


class Narrow(NamedTuple):
    """Two blocks of 32 columns in a register: factor · (code − offset) + minimum."""

    codes: ir.Value
    factors: ir.Value  # fp32 [2]
    minima: ir.Value | None = None  # fp32 [2]; then there is no offset


# --- reading a block ---


def _at(builder, block, place: int, kind: ir.Type, align: int = 1) -> ir.Value:
    """The value `place` bytes behind the block's beginning."""
    return builder.load(builder.bitcast(builder.gep(block, [I64(place)]), kind.as_pointer()), align=align)


def _half(builder, block, place: int) -> ir.Value:
    """The fp16 number there, as fp32."""
    return builder.fpext(_at(builder, block, place, F16), F32)


def _twice(builder, part) -> ir.Value:
    """32 bytes, and once more."""
    return take(builder, part, [*range(32)] * 2)


def _shifted(builder, value, left: Sequence[int]) -> ir.Value:
    """Equal stretches of a register, each shifted so many bits to the left, or to the right where negative.

    Bits cross over to neighbours, within 16 bits: the caller masks them off.
    """
    kind = ir.VectorType(I16, value.type.count // 2)
    amounts = [amount for amount in left for _ in range(kind.count // len(left))]
    value = builder.bitcast(value, kind)
    shift = builder.shl if max(left) > 0 else builder.lshr
    if any(amounts):
        value = shift(value, ir.Constant(kind, [abs(amount) for amount in amounts]))
    return builder.bitcast(value, ir.VectorType(I8, 2 * kind.count))


def _masked(builder, value, mask: int) -> ir.Value:
    return builder.and_(value, constant(value.type, mask))


def _bits(builder, value, left: Sequence[int], mask: int) -> ir.Value:
    return _masked(builder, _shifted(builder, value, left), mask)


def _looked_up(builder, table: list[int], offset: int, codes) -> ir.Value:
    """The numbers of codes of four bits, with the offset added, so that none is negative."""
    values = ir.Constant(BYTES, [value + offset for value in table] * 4)
    return call(builder, "x86.avx512.pshuf.b.512", BYTES, values, codes)


def _nibbles(builder, block, place: int) -> list[ir.Value]:
    """Four registers of 128 bytes: of every 32 bytes the low halves, then the high ones."""
    loaded = [_at(builder, block, place + 32 * part, HALF_BYTES) for part in range(4)]
    return [_bits(builder, _twice(builder, part), [0, -4], LOW) for part in loaded]


def _pairs(builder, block, place: int) -> list[ir.Value]:
    """Four registers of 64 bytes: of every 32 bytes the lowest two bits, then the next ones and so on."""
    loaded = [_twice(builder, _at(builder, block, place + 32 * part, HALF_BYTES)) for part in range(2)]
    return [_bits(builder, part, [-shift, -shift - 2], 3) for part in loaded for shift in (0, 4)]


def _shorts(builder, values) -> ir.Value:
    """Sixteen unsigned bytes in 16 bits each; of eight, each twice."""
    if values.type.count == 8:
        values = take(builder, values, [part // 2 for part in range(PARTS)])
    return builder.zext(values, SHORTS)


# --- wide types ---


def _six_bits(builder, block) -> tuple[ir.Value, ir.Value]:
    """Scales and minima of Q4_K and Q5_K: eight each, of six bits, in twelve bytes behind the two factors."""
    head = _at(builder, block, 0, QUARTER)
    first = take(builder, head, [4, 5, 6, 7, 12, 13, 14, 15, 8, 9, 10, 11, 12, 13, 14, 15])
    upper = take(builder, head, [4, 5, 6, 7, 4, 5, 6, 7, 8, 9, 10, 11, 8, 9, 10, 11])
    words = ir.VectorType(I32, 4)
    first = builder.lshr(builder.bitcast(first, words), ir.Constant(words, [0, 0, 0, 4]))
    first = builder.and_(first, ir.Constant(words, [0x3F3F3F3F, 0x0F0F0F0F] * 2))
    upper = builder.lshr(builder.bitcast(upper, words), constant(words, 2))
    upper = builder.and_(upper, ir.Constant(words, [0, 0x30303030] * 2))
    found = builder.bitcast(builder.or_(first, upper), QUARTER)
    return tuple(_shorts(builder, take(builder, found, range(first, first + 8))) for first in (0, 8))


def _q2_k(builder, block) -> Wide:
    both = _at(builder, block, 0, QUARTER)
    scales, minima = (_shorts(builder, _bits(builder, both, [shift], LOW)) for shift in (0, -4))
    codes = _pairs(builder, block, 16)
    return Wide(codes, scales, _half(builder, block, 80), None, minima, _half(builder, block, 82))


def _q3_k(builder, block) -> Wide:
    codes, high = _pairs(builder, block, 32), _twice(builder, _at(builder, block, 0, HALF_BYTES))
    highest = [_bits(builder, high, left, 4) for left in ([2, 1], [0, -1], [-2, -3], [-4, -5])]
    codes = [builder.or_(*both) for both in zip(codes, highest, strict=True)]
    tail, words = _at(builder, block, 94, QUARTER), ir.VectorType(I32, 4)
    low = builder.bitcast(take(builder, tail, [*range(2, 10)] * 2), words)
    low = builder.and_(builder.lshr(low, ir.Constant(words, [0, 0, 4, 4])), constant(words, 0x0F0F0F0F))
    upper = builder.bitcast(take(builder, tail, [*range(10, 14)] * 4), words)
    upper = builder.and_(builder.lshr(upper, ir.Constant(words, [0, 2, 4, 6])), constant(words, 0x03030303))
    both = builder.bitcast(builder.or_(low, builder.shl(upper, constant(words, 4))), QUARTER)
    scales = builder.sub(_shorts(builder, both), constant(SHORTS, 32))
    return Wide(codes, scales, _half(builder, block, 108), 2)


def _q4_k(builder, block) -> Wide:
    scales, minima = _six_bits(builder, block)
    return Wide(_nibbles(builder, block, 16), scales, _half(builder, block, 0), None, minima, _half(builder, block, 2))


def _q5_k(builder, block) -> Wide:
    scales, minima = _six_bits(builder, block)
    codes, high = _nibbles(builder, block, 48), _twice(builder, _at(builder, block, 16, HALF_BYTES))
    highest = [_bits(builder, high, left, 16) for left in ([4, 3], [2, 1], [0, -1], [-2, -3])]
    codes = [builder.or_(*both) for both in zip(codes, highest, strict=True)]
    return Wide(codes, scales, _half(builder, block, 0), None, minima, _half(builder, block, 2))


def _q6_k(builder, block) -> Wide:
    codes = []
    for part in range(2):
        low = _at(builder, block, 64 * part, BYTES)
        high = _twice(builder, _at(builder, block, 128 + 32 * part, HALF_BYTES))
        for shift, left in ((0, [4, 2]), (-4, [0, -2])):
            codes.append(builder.or_(_bits(builder, low, [shift], LOW), _bits(builder, high, left, HIGH)))
    scales = builder.sext(_at(builder, block, 192, QUARTER), SHORTS)
    return Wide(codes, scales, _half(builder, block, 208), 5)


def _iq4_xs(builder, block) -> Wide:
    codes = []
    for part in range(4):
        lanes = [lane for half in (0, 16) for _ in range(2) for lane in range(half, half + 16)]
        pair = take(builder, _at(builder, block, 8 + 32 * part, HALF_BYTES), lanes)
        codes.append(_looked_up(builder, NON_LINEAR, 128, _bits(builder, pair, [0, -4, 0, -4], LOW)))
    eight = ir.VectorType(I32, 8)
    low = builder.lshr(in_all_lanes(builder, _at(builder, block, 4, I32), 8), ir.Constant(eight, [*range(0, 32, 4)]))
    high = builder.zext(_at(builder, block, 2, I16), I32)
    high = builder.lshr(in_all_lanes(builder, high, 8), ir.Constant(eight, [*range(0, 16, 2)]))
    high = builder.shl(_masked(builder, high, 3), constant(eight, 4))
    scales = builder.trunc(builder.or_(_masked(builder, low, LOW), high), ir.VectorType(I8, 8))
    scales = builder.sub(_shorts(builder, scales), constant(SHORTS, 32))
    return Wide(codes, scales, _half(builder, block, 0), 7, short=False)


def _tq2_0(builder, block) -> Wide:
    return Wide(_pairs(builder, block, 0), constant(SHORTS, 1), _half(builder, block, 64), 0)


# --- narrow types: a block, or None behind a row's end ---


def _both(builder, blocks, read: Callable, nothing: ir.Constant) -> ir.Value:
    """The two blocks' bytes, one after the other."""
    return join(builder, [nothing if block is None else read(block) for block in blocks])


def _two(builder, blocks, read: Callable) -> ir.Value:
    """A number of either block: fp32 [2], or as many bits."""
    found = [None if block is None else read(block) for block in blocks]
    pair = ir.Constant(ir.VectorType(found[0].type, 2), None)
    for lane, value in enumerate(found):
        pair = pair if value is None else builder.insert_element(pair, value, I32(lane))
    return pair


def _factors(builder, blocks, place: int) -> ir.Value:
    return builder.fpext(_two(builder, blocks, lambda block: _at(builder, block, place, F16)), ir.VectorType(F32, 2))


def _halves(builder, blocks, place: int) -> ir.Value:
    """The low halves of a block's 16 bytes, then the high ones; so for both blocks."""
    read = _both(builder, blocks, lambda block: _at(builder, block, place, QUARTER), ir.Constant(QUARTER, None))
    lanes = [lane for half in (0, 16) for _ in range(2) for lane in range(half, half + 16)]
    return _bits(builder, take(builder, read, lanes), [0, -4, 0, -4], LOW)


def _fifth_bits(builder, blocks, place: int, codes) -> ir.Value:
    """Codes with 16 added where the block's 32 bits say so, which are in the order of columns."""
    bits = builder.bitcast(_two(builder, blocks, lambda block: _at(builder, block, place, I32)), I64)
    chosen = builder.bitcast(bits, ir.VectorType(ir.IntType(1), REGISTER))
    return builder.select(chosen, builder.or_(codes, constant(BYTES, 16)), codes)


def _q4_0(builder, blocks) -> Narrow:
    return Narrow(_halves(builder, blocks, 2), _factors(builder, blocks, 0))


def _q4_1(builder, blocks) -> Narrow:
    return Narrow(_halves(builder, blocks, 4), _factors(builder, blocks, 0), _factors(builder, blocks, 2))


def _q5_0(builder, blocks) -> Narrow:
    return Narrow(_fifth_bits(builder, blocks, 2, _halves(builder, blocks, 6)), _factors(builder, blocks, 0))


def _q5_1(builder, blocks) -> Narrow:
    codes = _fifth_bits(builder, blocks, 4, _halves(builder, blocks, 8))
    return Narrow(codes, _factors(builder, blocks, 0), _factors(builder, blocks, 2))


def _q8_0(builder, blocks) -> Narrow:
    codes = _both(builder, blocks, lambda block: _at(builder, block, 2, HALF_BYTES), ir.Constant(HALF_BYTES, None))
    return Narrow(builder.xor(codes, constant(BYTES, -128)), _factors(builder, blocks, 0))


def _iq4_nl(builder, blocks) -> Narrow:
    codes = _looked_up(builder, NON_LINEAR, 128, _halves(builder, blocks, 2))
    return Narrow(codes, _factors(builder, blocks, 0))


def _mxfp4(builder, blocks) -> Narrow:
    table = _powers(builder)

    def factor(block):
        return builder.load(builder.gep(table, [builder.zext(_at(builder, block, 0, I8), I64)]))

    codes = _looked_up(builder, E2M1, 12, _halves(builder, blocks, 1))
    return Narrow(codes, _two(builder, blocks, factor))


def _powers(builder) -> ir.Value:
    """Half of the powers of two that a byte stands for, fp32 [256]: arithmetic takes longer than a load."""
    kind, name = ir.ArrayType(F32, len(POWERS)), "toolkit_powers"
    try:
        table = builder.module.get_global(name)
    except KeyError:
        table = cgutils.global_constant(builder, name, ir.Constant(kind, POWERS))
    return builder.bitcast(table, F32.as_pointer())


WIDE = {
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_XS": _iq4_xs,
    "TQ2_0": _tq2_0,
}
NARROW = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "IQ4_NL": _iq4_nl,
    "MXFP4": _mxfp4,
}
# of narrow types: what is taken off codes; those that are not here have minima
OFFSETS = {"Q4_0": 8, "Q5_0": 16, "Q8_0": 128, "IQ4_NL": 128, "MXFP4": 12}


# --- multiplying ---


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
    zero, widen = ir.Constant(INTS, None), builder.zext if wide.short else builder.sext
    scales, sums = widen(wide.scales, INTS), zero
    for number, (codes, given) in enumerate(zip(wide.codes, x, strict=True)):
        products = call(builder, "x86.avx512.vpdpbusd.512", INTS, zero, builder.bitcast(codes, INTS), given)
        each = take(builder, scales, [4 * number + lane // 4 for lane in range(LANES)])
        if wide.short:
            sums = call(builder, "x86.avx512.vpdpwssd.512", INTS, sums, products, each)
        else:
            sums = builder.add(sums, builder.mul(products, each))
    taken_off = wide.scales if wide.minima is None else wide.minima
    taken_off = call(builder, "x86.avx2.pmadd.wd", ir.VectorType(I32, 8), taken_off, x_sums)
    taken_off = join(builder, [taken_off, ir.Constant(taken_off.type, None)])
    if wide.minima is None:
        sums = builder.sub(sums, builder.shl(taken_off, constant(INTS, wide.offset)))
    factor = in_all_lanes(builder, builder.fmul(wide.factor, x_scale), LANES)
    after = multiply_add(builder, builder.sitofp(sums, FLOATS), factor, before)
    if wide.minima is not None:
        factor = in_all_lanes(builder, builder.fneg(builder.fmul(wide.minimum_factor, x_scale)), LANES)
        after = multiply_add(builder, builder.sitofp(taken_off, FLOATS), factor, after)
    return after


def _add_wide(builder, name: str, block, unit, rows: Sequence[Row], sums: Sequence[ir.Value], blocks: int) -> None:
    """Add the products of a block with several vectors to the sums behind pointers; `unit` is its number in a row."""
    wide, first = WIDE[name](builder, block), builder.mul(unit, I64(WIDTH))
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
    add, blocks = (_add_wide, 1) if name in WIDE else (_add_narrow, 2)
    nbytes = blocks * LAYOUTS[name].nbytes

    @intrinsic(prefer_literal=True)
    def multiply_row(typing_context, data, row, codes, scales, more, vector, vectors):
        count = vectors.literal_value

        def generate(context, builder, signature, arguments):
            begins = _row(context, builder, signature, arguments, 0, arguments[1])
            of_vectors = [builder.add(arguments[5], I64(number)) for number in range(count)]
            rows = [Row(*(_row(context, builder, signature, arguments, k, v) for k in (2, 3, 4))) for v in of_vectors]
            sums = [cgutils.alloca_once(builder, FLOATS) for _ in rows]
            for place in sums:
                builder.store(ir.Constant(FLOATS, None), place)
            row_bytes = _columns(builder, arguments[0])
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


def _columns(builder, array: ir.Value) -> ir.Value:
    """The second size of an array's."""
    return builder.extract_value(builder.extract_value(array, 5), 1)


def _row(context, builder, signature, arguments, number: int, row) -> ir.Value:
    """A pointer to a row of the argument of this number."""
    kind = context.get_value_type(signature.args[number].dtype)
    at = builder.mul(row, _columns(builder, arguments[number]))
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
        fours, twos = vectors // AT_ONCE * AT_ONCE, vectors // 2 * 2
        for row in range(first, last):
            for vector in range(0, fours, AT_ONCE):
                store_rows(y, vector * rows + row, rows, multiply(data, row, codes, scales, more, vector, AT_ONCE), 1)
            for vector in range(fours, twos, 2):
                store_rows(y, vector * rows + row, rows, multiply(data, row, codes, scales, more, vector, 2), 1)
            for vector in range(twos, vectors):
                store_rows(y, vector * rows + row, rows, multiply(data, row, codes, scales, more, vector, 1), 1)

    return product


def knows(name: str) -> bool:
    """Whether there are kernels for a type."""
    return name in WIDE or name in NARROW


def rounding(name: str) -> str:
    """The name of the way that vectors are rounded for a type; types of one way share prepared vectors."""
    return "wide" if name in WIDE else f"narrow {OFFSETS.get(name)}"


def preparing(name: str, x: np.ndarray) -> Task:
    """The task that prepares vectors, fp32 [vectors, columns], for a type: its last arguments are what products take.

    Columns that no block fills are padded with zeros.
    """
    vectors, columns = x.shape
    if name in WIDE:
        scales, sums = np.empty((vectors, columns // WIDTH), np.float32), np.empty((vectors, columns // 16), np.int16)
        return Task(prepare_wide, (x, np.empty((vectors, columns), np.int8), scales, sums))
    padded = -(-columns // REGISTER) * REGISTER
    codes, scales = np.zeros((vectors, padded), np.int8), np.zeros((vectors, padded // 32), np.float32)
    if name in OFFSETS:
        return Task(narrow(OFFSETS[name]), (x, codes, scales, np.zeros((vectors, padded // 4), np.int32)))
    return Task(prepare_with_sums, (x, codes, scales, np.zeros_like(scales)))

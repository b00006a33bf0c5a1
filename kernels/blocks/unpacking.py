"""Blocks in registers of AVX-512: codes as unsigned bytes in the order of their columns, their scales and factors.

A function a type. `WIDE` are the types of 256 columns, with scales for every 16 or 32 of them. `NARROW` are those of
32 columns, which are taken two at a time. Codes that stand for signed numbers have an offset.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from llvmlite import ir
from numba.core import cgutils

from toolkit.kernels.engine import simd
from toolkit.kernels.engine.simd import F16, F32, I8, I16, I32, I64, call, constant, in_all_lanes, join, take

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
    """A block of 256 columns in registers: it is ± factor · scale · (code − 2^offset) − minimum_factor · minimum.

    There is an offset, a minimum, or neither of them.
    """

    codes: Sequence[ir.Value]  # four registers of unsigned bytes
    scales: ir.Value  # of 16 columns each, 16 bits
    factor: ir.Value
    offset: int | None = None  # its binary logarithm
    minima: ir.Value | None = None  # as scales
    minimum_factor: ir.Value | None = None
    signs: Sequence[ir.Value] = ()  # whether columns are negative, bits of four registers
    short: bool = True  # whether sums of two products with 8 bits fit 16 bits


class Narrow(NamedTuple):
    """Two blocks of 32 columns in a register: factor · (code − offset) + minimum."""

    codes: ir.Value
    factors: ir.Value  # fp32 [2]
    minima: ir.Value | None = None  # fp32 [2]; then there is no offset


# --- reading a block ---


def at(builder, block, place: int, kind: ir.Type, align: int = 1) -> ir.Value:
    """The value `place` bytes behind the block's beginning."""
    return builder.load(builder.bitcast(builder.gep(block, [I64(place)]), kind.as_pointer()), align=align)


def half(builder, block, place: int) -> ir.Value:
    """The fp16 number there, as fp32."""
    return builder.fpext(at(builder, block, place, F16), F32)


def _two_halves(builder, block, place: int) -> list[ir.Value]:
    """Two fp16 numbers side by side, as fp32."""
    both = builder.fpext(at(builder, block, place, ir.VectorType(F16, 2)), ir.VectorType(F32, 2))
    return [builder.extract_element(both, I32(lane)) for lane in range(2)]


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
    """Equal stretches of a register of bytes, each shifted so many bits to the left or to the right, then masked."""
    if any(left) and simd.has("gfni"):
        return _moved(builder, value, left, mask)
    return _masked(builder, _shifted(builder, value, left), mask)


def _moved(builder, value, left: Sequence[int], mask: int) -> ir.Value:
    """The same by one instruction, which multiplies each byte with a matrix of 8 × 8 bits, the highest row first."""
    rows = {
        amount: [1 << bit - amount if mask >> bit & 1 and 0 <= bit - amount < 8 else 0 for bit in reversed(range(8))]
        for amount in left
    }
    words = value.type.count // 8 // len(left)
    matrices = ir.Constant(value.type, [row for amount in left for _ in range(words) for row in rows[amount]])
    name = f"x86.vgf2p8affineqb.{8 * value.type.count}"
    return call(builder, name, value.type, value, matrices, I8(0))


def _looked_up(builder, table: list[int], offset: int, codes) -> ir.Value:
    """The numbers of codes of four bits, with the offset added, so that none is negative."""
    values = ir.Constant(BYTES, [value + offset for value in table] * 4)
    return call(builder, "x86.avx512.pshuf.b.512", BYTES, values, codes)


def _nibbles(builder, block, place: int) -> list[ir.Value]:
    """Four registers of 128 bytes: of every 32 bytes the low halves, then the high ones."""
    loaded = [at(builder, block, place + 32 * part, HALF_BYTES) for part in range(4)]
    return [_bits(builder, _twice(builder, part), [0, -4], LOW) for part in loaded]


def _pairs(builder, block, place: int) -> list[ir.Value]:
    """Four registers of 64 bytes: of every 32 bytes the lowest two bits, then the next ones and so on."""
    loaded = [_twice(builder, at(builder, block, place + 32 * part, HALF_BYTES)) for part in range(2)]
    return [_bits(builder, part, [-shift, -shift - 2], 3) for part in loaded for shift in (0, 4)]


def _shorts(builder, values) -> ir.Value:
    """Sixteen unsigned bytes in 16 bits each; of eight, each twice."""
    if values.type.count == 8:
        values = take(builder, values, [part // 2 for part in range(PARTS)])
    return builder.zext(values, SHORTS)


# --- wide types ---


def _six_bits(builder, block) -> tuple[ir.Value, ir.Value]:
    """Scales and minima of Q4_K and Q5_K: eight each, of six bits, in twelve bytes behind the two factors."""
    head = at(builder, block, 0, QUARTER)
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
    both = at(builder, block, 0, QUARTER)
    scales, minima = (_shorts(builder, _bits(builder, both, [shift], LOW)) for shift in (0, -4))
    factor, minimum_factor = _two_halves(builder, block, 80)
    return Wide(_pairs(builder, block, 16), scales, factor, None, minima, minimum_factor)


def _q3_k(builder, block) -> Wide:
    codes, high = _pairs(builder, block, 32), _twice(builder, at(builder, block, 0, HALF_BYTES))
    highest = [_bits(builder, high, left, 4) for left in ([2, 1], [0, -1], [-2, -3], [-4, -5])]
    codes = [builder.or_(*both) for both in zip(codes, highest, strict=True)]
    tail, words = at(builder, block, 94, QUARTER), ir.VectorType(I32, 4)
    low = builder.bitcast(take(builder, tail, [*range(2, 10)] * 2), words)
    low = builder.and_(builder.lshr(low, ir.Constant(words, [0, 0, 4, 4])), constant(words, 0x0F0F0F0F))
    upper = builder.bitcast(take(builder, tail, [*range(10, 14)] * 4), words)
    upper = builder.and_(builder.lshr(upper, ir.Constant(words, [0, 2, 4, 6])), constant(words, 0x03030303))
    both = builder.bitcast(builder.or_(low, builder.shl(upper, constant(words, 4))), QUARTER)
    scales = builder.sub(_shorts(builder, both), constant(SHORTS, 32))
    return Wide(codes, scales, half(builder, block, 108), 2)


def _q4_k(builder, block) -> Wide:
    scales, minima = _six_bits(builder, block)
    factor, minimum_factor = _two_halves(builder, block, 0)
    return Wide(_nibbles(builder, block, 16), scales, factor, None, minima, minimum_factor)


def _q5_k(builder, block) -> Wide:
    scales, minima = _six_bits(builder, block)
    codes, high = _nibbles(builder, block, 48), _twice(builder, at(builder, block, 16, HALF_BYTES))
    highest = [_bits(builder, high, left, 16) for left in ([4, 3], [2, 1], [0, -1], [-2, -3])]
    codes = [builder.or_(*both) for both in zip(codes, highest, strict=True)]
    factor, minimum_factor = _two_halves(builder, block, 0)
    return Wide(codes, scales, factor, None, minima, minimum_factor)


def _q6_k(builder, block) -> Wide:
    codes = []
    for part in range(2):
        low = at(builder, block, 64 * part, BYTES)
        high = _twice(builder, at(builder, block, 128 + 32 * part, HALF_BYTES))
        for shift, left in ((0, [4, 2]), (-4, [0, -2])):
            codes.append(builder.or_(_bits(builder, low, [shift], LOW), _bits(builder, high, left, HIGH)))
    scales = builder.sext(at(builder, block, 192, QUARTER), SHORTS)
    return Wide(codes, scales, half(builder, block, 208), 5)


def _iq4_xs(builder, block) -> Wide:
    codes = []
    for part in range(4):
        lanes = [lane for half in (0, 16) for _ in range(2) for lane in range(half, half + 16)]
        pair = take(builder, at(builder, block, 8 + 32 * part, HALF_BYTES), lanes)
        codes.append(_looked_up(builder, NON_LINEAR, 128, _bits(builder, pair, [0, -4, 0, -4], LOW)))
    eight = ir.VectorType(I32, 8)
    low = builder.lshr(in_all_lanes(builder, at(builder, block, 4, I32), 8), ir.Constant(eight, [*range(0, 32, 4)]))
    high = builder.zext(at(builder, block, 2, I16), I32)
    high = builder.lshr(in_all_lanes(builder, high, 8), ir.Constant(eight, [*range(0, 16, 2)]))
    high = builder.shl(_masked(builder, high, 3), constant(eight, 4))
    scales = builder.trunc(builder.or_(_masked(builder, low, LOW), high), ir.VectorType(I8, 8))
    scales = builder.sub(_shorts(builder, scales), constant(SHORTS, 32))
    return Wide(codes, scales, half(builder, block, 0), 7, short=False)


def _tq2_0(builder, block) -> Wide:
    return Wide(_pairs(builder, block, 0), constant(SHORTS, 1), half(builder, block, 64), 0)


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
    return builder.fpext(_two(builder, blocks, lambda block: at(builder, block, place, F16)), ir.VectorType(F32, 2))


def _halves(builder, blocks, place: int) -> ir.Value:
    """The low halves of a block's 16 bytes, then the high ones; so for both blocks."""
    read = _both(builder, blocks, lambda block: at(builder, block, place, QUARTER), ir.Constant(QUARTER, None))
    lanes = [lane for half in (0, 16) for _ in range(2) for lane in range(half, half + 16)]
    return _bits(builder, take(builder, read, lanes), [0, -4, 0, -4], LOW)


def _fifth_bits(builder, blocks, place: int, codes) -> ir.Value:
    """Codes with 16 added where the block's 32 bits say so, which are in the order of columns."""
    bits = builder.bitcast(_two(builder, blocks, lambda block: at(builder, block, place, I32)), I64)
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
    codes = _both(builder, blocks, lambda block: at(builder, block, 2, HALF_BYTES), ir.Constant(HALF_BYTES, None))
    return Narrow(builder.xor(codes, constant(BYTES, -128)), _factors(builder, blocks, 0))


def _iq4_nl(builder, blocks) -> Narrow:
    codes = _looked_up(builder, NON_LINEAR, 128, _halves(builder, blocks, 2))
    return Narrow(codes, _factors(builder, blocks, 0))


def _mxfp4(builder, blocks) -> Narrow:
    table = _powers(builder)

    def factor(block):
        return builder.load(builder.gep(table, [builder.zext(at(builder, block, 0, I8), I64)]))

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

"""Blocks that name entries of a codebook, in registers of AVX-512 with VBMI and GFNI: types IQ2 and IQ3.

An entry has eight magnitudes of three levels or four of eight: 16 or 12 bits, one level's number behind the other. So a
codebook is two tables of bytes that fit registers, and 64 entries are looked up at once. `vpmultishiftqb` takes the
numbers apart, and one more look-up makes them magnitudes. Signs are a bit a column; they go to the vector.

Source: `ggml-common.h` of ggml (MIT); its grids are those of the package `gguf`.
"""

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

from llvmlite import ir

from toolkit.kernels.blocks.unpacking import (
    BYTES,
    HALF_BYTES,
    LOW,
    PARTS,
    REGISTER,
    SHORTS,
    Wide,
    at,
    half,
)
from toolkit.kernels.engine import simd
from toolkit.kernels.engine.simd import F32, I8, I16, I32, I64, call, constant, in_all_lanes, join, take

FEATURES = ("avx512vbmi", "gfni")
EIGHT_BYTES = ir.VectorType(I8, 8)
EIGHT, MASK = ir.VectorType(I32, 8), ir.VectorType(ir.IntType(1), REGISTER)
PARITY = [0x7F, 0x40, 0x20, 0x10, 0x08, 0x04, 0x02, 0x01]  # bits 0 to 6 as they are; bit 7 makes their number even


class Codebook(NamedTuple):
    """The low and the high bytes of all entries, the magnitudes of an entry, the bits of each, and the levels."""

    low: list[int]
    high: list[int]
    size: int
    bits: int
    levels: Sequence[int]


@cache
def codebook(name: str) -> Codebook:
    """The codebook of a type. All of IQ2 have the same three levels."""
    from gguf import quants

    kind = getattr(quants, name)
    kind.init_grid()
    grid, levels = kind.grid.reshape(-1, kind.grid.shape[-1]), [*kind.grid_map]
    bits = 2 if len(levels) == 3 else 3
    entries = [sum(levels.index(int(value)) << bits * place for place, value in enumerate(entry)) for entry in grid]
    return Codebook([entry & 255 for entry in entries], [entry >> 8 for entry in entries], grid.shape[1], bits, levels)


def _looked_up(builder, table: Sequence[int], numbers, further: Sequence[ir.Value]) -> ir.Value:
    """The bytes of a table at these numbers of eight bits and `further` ones, the highest first."""
    if further:
        middle = len(table) // 2
        lower, upper = (_looked_up(builder, part, numbers, further[1:]) for part in (table[:middle], table[middle:]))
        return builder.select(further[0], upper, lower)
    registers = [ir.Constant(BYTES, [*table[first : first + REGISTER]]) for first in range(0, 256, REGISTER)]
    lower, upper = (
        call(builder, "x86.avx512.vpermi2var.qi.512", BYTES, low, numbers, high)
        for low, high in (registers[:2], registers[2:])
    )
    return builder.select(builder.icmp_signed("<", numbers, constant(BYTES, 0)), upper, lower)


def _magnitudes(builder, book: Codebook, numbers, places: Sequence[int], *further: ir.Value) -> list[ir.Value]:
    """Four registers of magnitudes; `places`: where the number of each entry is; `further`: its high bits."""
    low, high = (_looked_up(builder, table, numbers, further) for table in (book.low, book.high))
    shifts = ir.Constant(BYTES, [16 * (byte // book.size) + book.bits * (byte % book.size) for byte in range(8)] * 8)
    levels = [*book.levels, *[0] * ((1 << book.bits) - len(book.levels))]
    levels = ir.Constant(BYTES, levels * (REGISTER // len(levels)))  # the bits above those of a number do not matter
    found, words = [], 8 // book.size
    for part in range(4):
        taken = [
            place + REGISTER * plane
            for word in range(8)
            for entry in [*places[words * (8 * part + word) :][:words]] * (4 // words)
            for place, plane in ((entry, 0), (entry, 1))
        ]
        control = simd.in_register(builder, ir.Constant(BYTES, taken))
        entries = call(builder, "x86.avx512.vpermi2var.qi.512", BYTES, low, control, high)
        numbers = call(builder, "x86.avx512.pmultishift.qb.512", BYTES, shifts, entries)
        found.append(call(builder, "x86.avx512.permvar.qi.512", BYTES, levels, numbers))
    return found


def _signs(builder, data, shifts: Sequence[int], places: Sequence[int]) -> list[ir.Value]:
    """Whether columns are negative, from numbers of seven bits for eight of them; the eighth bit makes it even.

    In each eight bytes of `data` numbers begin at the bits `shifts`; `places` says at which byte each is then.
    """
    seven = call(builder, "x86.avx512.pmultishift.qb.512", BYTES, ir.Constant(BYTES, [*shifts] * 8), data)
    matrix = ir.Constant(BYTES, PARITY * 8)
    eight = call(builder, "x86.vgf2p8affineqb.512", BYTES, seven, matrix, I8(0))
    found = []
    for part in range(4):
        control = simd.in_register(builder, ir.Constant(BYTES, [places[8 * part + byte // 8] for byte in range(64)]))
        spread = call(builder, "x86.avx512.permvar.qi.512", BYTES, eight, control)
        found.append(_where(builder, spread, [1, 2, 4, 8, 16, 32, 64, -128] * 8))
    return found


def _odd(builder, values) -> ir.Value:
    """Scales 2 · value + 1, for eight values of four bits, each twice and in 16 bits."""
    short = builder.trunc(values, ir.VectorType(I16, 8))
    short = builder.or_(builder.shl(short, constant(short.type, 1)), constant(short.type, 1))
    return take(builder, short, [part // 2 for part in range(PARTS)])


def _odd_nibbles(builder, block, place: int) -> ir.Value:
    """Scales 2 · value + 1, for the sixteen values of four bits in eight bytes."""
    both = builder.zext(
        take(builder, at(builder, block, place, EIGHT_BYTES), [part // 2 for part in range(16)]), SHORTS
    )
    values = builder.and_(builder.lshr(both, ir.Constant(SHORTS, [0, 4] * 8)), constant(SHORTS, LOW))
    return builder.or_(builder.shl(values, constant(SHORTS, 1)), constant(SHORTS, 1))


def _plain_signs(builder, block, place: int) -> list[ir.Value]:
    """A bit for each column."""
    return [builder.bitcast(at(builder, block, place + 8 * part, I64), MASK) for part in range(4)]


def _where(builder, data, bits: Sequence[int]) -> ir.Value:
    """Which bytes have these bits."""
    return builder.icmp_unsigned("!=", builder.and_(data, ir.Constant(BYTES, bits)), constant(BYTES, 0))


def _iq2_xxs(builder, block) -> Wide:
    """In every eight bytes, four are numbers of entries, and the others four numbers of signs and a scale."""
    data, places = at(builder, block, 2, BYTES), [8 * (group // 4) + group % 4 for group in range(32)]
    words = builder.bitcast(data, ir.VectorType(I64, 8))
    scales = _odd(builder, builder.lshr(words, constant(words.type, 60)))
    factor = builder.fmul(half(builder, block, 0), F32(0.125))
    codes = _magnitudes(builder, codebook("IQ2_XXS"), data, places)
    return Wide(codes, scales, factor, signs=_signs(builder, data, [32, 39, 46, 53] * 2, places))


def _iq2_xs(builder, block) -> Wide:
    """Words of 16 bits: nine of an entry's number, and seven of signs."""
    data, places = at(builder, block, 2, BYTES), range(0, 64, 2)
    words = builder.bitcast(data, ir.VectorType(I16, 32))
    ninth = _where(builder, builder.bitcast(builder.lshr(words, constant(words.type, 8)), BYTES), [1] * 64)
    codes = _magnitudes(builder, codebook("IQ2_XS"), data, places, ninth)
    signs = _signs(builder, data, [9, 9, 25, 25, 41, 41, 57, 57], places)
    factor = builder.fmul(half(builder, block, 0), F32(0.125))
    return Wide(codes, _odd_nibbles(builder, block, 66), factor, signs=signs)


def _iq2_s(builder, block) -> Wide:
    """32 numbers of entries, a bit for each sign, two more bits of each number, and sixteen scales."""
    numbers = join(builder, [at(builder, block, 2, HALF_BYTES), ir.Constant(HALF_BYTES, None)])
    more = take(builder, at(builder, block, 66, EIGHT_BYTES), [entry // 4 % 8 for entry in range(64)])
    ninth, tenth = (_where(builder, more, [bit, 4 * bit, 16 * bit, 64 * bit - 256 * (bit > 1)] * 16) for bit in (1, 2))
    codes = _magnitudes(builder, codebook("IQ2_S"), numbers, range(32), tenth, ninth)
    factor = builder.fmul(half(builder, block, 0), F32(0.125))
    return Wide(codes, _odd_nibbles(builder, block, 74), factor, signs=_plain_signs(builder, block, 34))


def _iq3_xxs(builder, block) -> Wide:
    """64 numbers of entries, then eight words of four numbers of signs and a scale."""
    data = at(builder, block, 66, HALF_BYTES)
    scales = _odd(builder, builder.lshr(builder.bitcast(data, EIGHT), constant(EIGHT, 28)))
    factor = builder.fmul(half(builder, block, 0), F32(0.25))
    codes = _magnitudes(builder, codebook("IQ3_XXS"), at(builder, block, 2, BYTES), range(64))
    both = join(builder, [data, ir.Constant(HALF_BYTES, ir.Undefined)])
    return Wide(codes, scales, factor, signs=_signs(builder, both, [0, 7, 14, 21, 32, 39, 46, 53], range(32)))


def _iq3_s(builder, block) -> Wide:
    """64 numbers of entries, their ninth bits, a bit for each sign, and eight scales of four bits."""
    ninth = builder.bitcast(at(builder, block, 66, I64), MASK)
    scales = in_all_lanes(builder, at(builder, block, 106, I32), 8)
    scales = builder.and_(builder.lshr(scales, ir.Constant(EIGHT, [*range(0, 32, 4)])), constant(EIGHT, LOW))
    codes = _magnitudes(builder, codebook("IQ3_S"), at(builder, block, 2, BYTES), range(64), ninth)
    return Wide(codes, _odd(builder, scales), half(builder, block, 0), signs=_plain_signs(builder, block, 74))


CODEBOOKS = {"IQ2_XXS": _iq2_xxs, "IQ2_XS": _iq2_xs, "IQ2_S": _iq2_s, "IQ3_XXS": _iq3_xxs, "IQ3_S": _iq3_s}

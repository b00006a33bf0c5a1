"""The fused product of SpQR for CPUs with AVX-512, VBMI and VNNI: a row of a tile in each 32-bit lane.

The 32 bits from byte 0 of a word and those from byte 3 each hold eight codes, both at bits 6, 9 and so on to 27, and
the first hold the codes of scale and zero point, too. A register takes one of these parts of all sixteen rows.
`vpmultishiftqb` and an AND give four codes of each row, a byte each, and `vpdpbusd` multiplies them with bytes and
adds. An activation is two bytes, 256 · high + low, and both meet the same codes.

The eight levels of scales and those of zero points share a register, too, and `vpermps` looks up one for each row.
"""

import numpy as np
from llvmlite import ir

from toolkit.kernels.engine import simd
from toolkit.kernels.engine.simd import F16, F32, I8, I16, I32, I64, call, constant, in_all_lanes
from toolkit.kernels.spqr.cpu_simd import (
    HIGH_PART,
    ROW,
    Fused,
    add_up,
    dequantise,
    fused,
    in_order,
    prepare_two_bytes,
    rows_of_lanes,
)
from toolkit.kernels.spqr.shared import LEVELS, SECOND_ORDER, TILE, WEIGHTS, ZERO

AT_ONCE = 4  # vectors
HALF, BYTES = 8, 64  # words in a register, and their bytes
ALL_BYTES, SHORTS, INTS = ir.VectorType(I8, BYTES), ir.VectorType(I16, 32), ir.VectorType(I32, 16)
ROWS_OF_LANES = rows_of_lanes(HALF)


def _of_both(builder, name: str, kind: ir.VectorType, registers, order: list[int]) -> ir.Value:
    """The named elements of two registers, in one instruction: of a constant order LLVM would make several."""
    first, second = (builder.bitcast(register, kind) for register in registers)
    order = ir.Constant(kind, order + [0] * (kind.count - len(order)))
    return call(builder, f"x86.avx512.{name}", kind, first, simd.in_register(builder, order), second)


def _fields(builder, parts, starts: list[int]) -> ir.Value:
    """From each 64 bits the eight from every start on, a byte each."""
    suffix, kind = 8 * parts.type.count, parts.type
    starts = ir.Constant(kind, starts * (kind.count // len(starts)))
    return call(builder, f"x86.avx512.pmultishift.qb.{suffix}", kind, starts, parts)


def _statistics(builder, registers, low) -> list[ir.Value]:
    """Scales and zero points of a tile's rows; `low` holds the words' low 32 bits."""
    # the last 16 bits of every other row, of which eight count: the four numbers' bytes, low ones first
    carried = _of_both(builder, "vpermi2var.hi.512", SHORTS, registers, [4 * row + 3 for row in range(0, TILE, 2)])
    carried = simd.take(builder, builder.bitcast(carried, ALL_BYTES), range(16))
    numbers = _fields(builder, carried, [16 * place + SECOND_ORDER - 48 for _ in range(2) for place in range(4)])
    numbers = builder.fpext(builder.bitcast(numbers, ir.VectorType(F16, 8)), ir.VectorType(F32, 8))
    numbers = simd.in_register(builder, numbers)  # LLVM would convert sixteen
    slopes, offsets = (simd.take(builder, numbers, [at] * LEVELS + [at + 1] * LEVELS) for at in (0, 4))
    levels = ir.Constant(ROW, [float(level) for level in range(LEVELS)] * 2)
    levels = dequantise(builder, levels, slopes, offsets)  # eight of scales, then eight of zero points
    of_scales = builder.and_(low, constant(INTS, LEVELS - 1))
    of_zeros = builder.or_(builder.lshr(low, constant(INTS, ZERO)), constant(INTS, LEVELS))
    return [call(builder, "x86.avx512.permvar.sf.512", ROW, levels, codes) for codes in (of_scales, of_zeros)]


def _multiply_integers(builder, word, vectors, sums) -> ir.Value:
    """Add Σ s·(q − z)·x of a tile to `sums`. The high bytes of prepared activations come first."""
    first = builder.bitcast(word, ALL_BYTES.as_pointer())
    registers = [builder.load(builder.gep(first, [I64(half)]), align=8) for half in range(2)]
    lanes = ir.Constant(INTS, [2 * row for row in ROWS_OF_LANES])
    low = builder.shuffle_vector(*(builder.bitcast(register, INTS) for register in registers), lanes)
    places = [8 * row + HIGH_PART // 8 + byte for row in ROWS_OF_LANES for byte in range(4)]
    high = _of_both(builder, "vpermi2var.qi.512", ALL_BYTES, registers, places)
    scales, zero_points = _statistics(builder, registers, low)
    codes = [_four_codes(builder, part, first) for part in (low, high) for first in (0, 4)]
    results = []
    for number, (x, x_scale, x_sum) in enumerate(vectors):
        product = _add_products(builder, ir.Constant(INTS, None), codes, x, 0)
        product = builder.shl(product, constant(INTS, 8))
        product = builder.sitofp(_add_products(builder, product, codes, x, len(codes)), ROW)
        product = builder.fmul(product, in_all_lanes(builder, x_scale, TILE))
        results.append(add_up(builder, sums, number, scales, zero_points, x_sum, product))
    return simd.join(builder, results)


def _four_codes(builder, part, first: int) -> ir.Value:
    """Codes `first` to `first + 3` of this part of each row, a byte each."""
    starts = [32 * lane + WEIGHTS + 3 * column for lane in range(2) for column in range(first, first + 4)]
    codes = _fields(builder, builder.bitcast(part, ALL_BYTES), starts)
    return builder.bitcast(builder.and_(codes, constant(ALL_BYTES, LEVELS - 1)), INTS)


def _add_products(builder, sums, codes: list[ir.Value], x, place: int) -> ir.Value:
    """Add the products with the bytes of prepared activations, from the given four of them on."""
    fours = builder.bitcast(x, I32.as_pointer())
    for number, four_codes in enumerate(codes, place):
        four = in_all_lanes(builder, builder.load(builder.gep(fours, [I64(number)]), align=1), TILE)
        sums = call(builder, "x86.avx512.vpdpbusd.512", INTS, sums, four_codes, builder.bitcast(four, INTS))
    return sums


INT16 = Fused(fused(_multiply_integers), in_order(HALF), AT_ONCE, prepare_two_bytes, np.int16)

"""The fused product of SpQR for CPUs with AVX-512, VBMI and VNNI: eight words in a register.

`vpmultishiftqb` takes any eight bits of a word to each byte, and `vpermt2b` any bytes of a tile to any place. So the
eight levels of scales and those of zero points are found in one register, and looked up by one shuffle.
`vpmultishiftqb` and an AND also give half of the codes of eight rows, a byte each, and `vpdpbusd` multiplies them with
bytes and adds. An activation is two bytes, 256 · high + low, and both meet the same codes.
"""

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from toolkit.kernels.engine import simd
from toolkit.kernels.engine.simd import I64, Vector
from toolkit.kernels.spqr.cpu_simd import F32, I8, I16, Fused, fused, multiply_add, prepare_two_bytes, splat
from toolkit.kernels.spqr.shared import LEVELS, SECOND_ORDER, TILE, WEIGHTS, ZERO

AT_ONCE = 4  # vectors
HALF, BYTES = 8, 64  # words in a register, and their bytes
ALL_BYTES, SHORTS, INTS = ir.VectorType(I8, BYTES), ir.VectorType(I16, 32), ir.VectorType(simd.I32, 16)
FLOATS, HALVES = ir.VectorType(F32, TILE), ir.VectorType(ir.HalfType(), TILE)


def _registers(builder, word) -> list[ir.Value]:
    """The sixteen words of a tile, eight in a register."""
    first = builder.bitcast(word, ALL_BYTES.as_pointer())
    return [builder.load(builder.gep(first, [I64(half)]), align=8) for half in range(2)]


def _fields(builder, words, starts: list[int]) -> ir.Value:
    """From each word the eight bits from every start on, a byte each."""
    kind = ir.FunctionType(ALL_BYTES, [ALL_BYTES] * 2)
    shift = builder.module.declare_intrinsic("llvm.x86.avx512.pmultishift.qb.512", (), kind)
    return builder.call(shift, [ir.Constant(ALL_BYTES, starts * HALF), words])


def _bytes(builder, registers, order: list[int]) -> ir.Value:
    """The named ones of 128 bytes."""
    indices = ir.Constant(ir.VectorType(simd.I32, len(order)), order)
    return builder.shuffle_vector(*registers, indices)


def _through_half(builder, floats) -> ir.Value:
    return builder.fpext(builder.fptrunc(floats, HALVES), FLOATS)


@intrinsic
def statistics(typing_context, words, at):
    """A tile's scales, sixteen lanes, then its zero points."""

    def generate(context, builder, signature, arguments):
        word = simd.pointer(context, builder, words, *arguments, I64)
        carried = [_fields(builder, some, [0, ZERO, SECOND_ORDER, 0, 0, 0, 0, 0]) for some in _registers(builder, word)]

        def splat_pair(numbers):  # eight lanes of each
            order = [32 * number + 16 * byte + 2 for number in numbers for _ in range(LEVELS) for byte in range(2)]
            halves = builder.bitcast(_bytes(builder, carried, order), HALVES)
            return builder.fpext(halves, FLOATS)

        slopes, offsets = splat_pair((0, 1)), splat_pair((2, 3))
        levels = ir.Constant(FLOATS, [float(level) for level in range(LEVELS)] * 2)
        levels = _through_half(builder, builder.fsub(levels, offsets))
        levels = builder.bitcast(builder.fptrunc(builder.fmul(slopes, levels), HALVES), ir.VectorType(I16, TILE))
        places = [8 * row + field for field in range(2) for row in range(TILE) for _ in range(2)]
        codes = builder.bitcast(_bytes(builder, carried, places), SHORTS)
        codes = builder.and_(codes, ir.Constant(SHORTS, [LEVELS - 1] * 2 * TILE))
        codes = builder.or_(codes, ir.Constant(SHORTS, [0] * TILE + [LEVELS] * TILE))
        kind = ir.FunctionType(SHORTS, [SHORTS] * 2)
        lookup = builder.module.declare_intrinsic("llvm.x86.avx512.permvar.hi.512", (), kind)
        table = simd.join(builder, [levels, ir.Constant(levels.type, ir.Undefined)])
        found = builder.bitcast(builder.call(lookup, [table, codes]), ir.VectorType(ir.HalfType(), 2 * TILE))
        return builder.fpext(found, ir.VectorType(F32, 2 * TILE))

    return Vector(types.float32, 2 * TILE)(words, types.int64), generate


def _multiply_integers(builder, word, vectors, found, sums) -> ir.Value:
    """Add Σ s·(q − z)·x of a tile to `sums`. The high bytes of prepared activations come first."""
    kind = ir.FunctionType(INTS, [INTS] * 3)
    multiply = builder.module.declare_intrinsic("llvm.x86.avx512.vpdpbusd.512", (), kind)
    given = [[_eight_columns(builder, x, place) for place in range(4)] for x, _, _ in vectors]
    totals = [[] for _ in vectors]
    for words in _registers(builder, word):
        codes = [_codes(builder, words, part) for part in range(2)]
        for (*high, low, last), total in zip(given, totals, strict=True):
            products = ir.Constant(INTS, None)
            for half, eights in zip(codes, high, strict=True):
                products = builder.call(multiply, [products, half, eights])
            products = builder.shl(products, ir.Constant(INTS, [8] * TILE))
            for half, eights in zip(codes, (low, last), strict=True):
                products = builder.call(multiply, [products, half, eights])
            total.append(products)
    scales, zero_points = (simd.take(builder, found, range(at, at + TILE)) for at in (0, TILE))
    results = []
    for number, ((_, x_scale, x_sum), total) in enumerate(zip(vectors, totals, strict=True)):
        even, odd = (
            builder.shuffle_vector(*total, ir.Constant(INTS, list(range(lane, 2 * TILE, 2)))) for lane in range(2)
        )
        product = builder.fmul(builder.sitofp(builder.add(even, odd), FLOATS), splat(builder, x_scale, TILE))
        product = multiply_add(builder, zero_points, splat(builder, builder.fneg(x_sum), TILE), product)
        before = simd.take(builder, sums, range(TILE * number, TILE * (number + 1)))
        results.append(multiply_add(builder, scales, product, before))
    return simd.join(builder, results)


def _codes(builder, words, part: int) -> ir.Value:
    """Half of the codes of eight words, a byte each."""
    starts = [WEIGHTS + 3 * column for column in range(8 * part, 8 * part + 8)]
    codes = builder.and_(_fields(builder, words, starts), ir.Constant(ALL_BYTES, [LEVELS - 1] * BYTES))
    return builder.bitcast(codes, INTS)


def _eight_columns(builder, x, place: int) -> ir.Value:
    """Eight bytes of prepared activations, for every word of a register."""
    eight = builder.load(builder.gep(builder.bitcast(x, I64.as_pointer()), [I64(place)]), align=1)
    return builder.bitcast(splat(builder, eight, HALF), INTS)


@numba.njit(inline="always")
def as_it_is(sums):
    """A lane's row is its number already."""
    return sums


INT16 = Fused(statistics, fused(_multiply_integers), as_it_is, AT_ONCE, prepare_two_bytes, np.int16)

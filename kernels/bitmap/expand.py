"""From a bitmap word to 32 lanes of a row: the step that every SIMD kernel here turns on.

`expand(values, at, word)` reads the next values and puts each in the lane of its set bit, with zeros between. It may
read, but never uses, up to `values[at + 31]`.
"""

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from toolkit.kernels.bitmap.shared import WORD
from toolkit.kernels.common import simd
from toolkit.kernels.common.simd import I32, I64, Vector

REGISTER = 16  # bytes that one byte shuffle moves
ABSENT = 0x80  # a shuffle index that gives a zero


@intrinsic
def by_shuffle(typing_context, values, at, word):
    """With SSSE3's byte shuffle: a table tells, for every pattern of 4 or 8 bits, where each byte goes."""
    width = values.dtype.bitwidth // 8
    lanes = min(REGISTER // width, 8)

    def generate(context, builder, signature, arguments):
        array, at_value, word_value = arguments
        some, full = (ir.VectorType(ir.IntType(8), size) for size in (lanes * width, REGISTER))
        table = simd.constant_table(builder, f"shuffles_{width}", shuffles(lanes, width))
        kind = ir.FunctionType(full, [full, full])
        shuffle = builder.module.declare_intrinsic("llvm.x86.ssse3.pshuf.b.128", (), kind)

        def expanded(start: int):
            place = _place(builder, at_value, word_value, start)
            data = builder.load(simd.pointer(context, builder, values, array, place, some), align=1)
            if some != full:
                data = simd.join(builder, [data, ir.Constant(some, None)])
            pattern = builder.and_(builder.lshr(word_value, I32(start)), I32((1 << lanes) - 1))
            order = builder.load(builder.gep(table, [builder.zext(pattern, I64)]), align=REGISTER)
            moved = builder.call(shuffle, [data, order])
            return builder.bitcast(simd.take(builder, moved, range(some.count)), part)

        part = context.get_value_type(Vector(values.dtype, lanes))
        return simd.join(builder, [expanded(start) for start in range(0, WORD, lanes)])

    return Vector(values.dtype, WORD)(values, types.int64, types.uint32), generate


def shuffles(lanes: int, width: int) -> list[list[int]]:
    """For every pattern of `lanes` bits, the source of each byte: elements of `width` bytes, the lowest bit first."""
    return [_shuffle(pattern, lanes, width) for pattern in range(1 << lanes)]


def _shuffle(pattern: int, lanes: int, width: int) -> list[int]:
    order, taken = [], 0
    for lane in range(lanes):
        present = pattern >> lane & 1
        order += [taken * width + byte if present else ABSENT for byte in range(width)]
        taken += present
    return order + [ABSENT] * (REGISTER - len(order))


@intrinsic
def by_instruction(typing_context, values, at, word):
    """With AVX-512's expand instruction, in its register form: the one that reads memory is slow on AMD.

    For a CPU without it LLVM's generic expanding load is written instead, which becomes plain branches there: right,
    and of use only to test the kernels around it.
    """
    lanes = min(WORD, simd.CACHE_LINE * 8 // values.dtype.bitwidth)
    part = Vector(values.dtype, lanes)

    def generate(context, builder, signature, arguments):
        array, at_value, word_value = arguments
        bits = builder.bitcast(word_value, ir.VectorType(ir.IntType(1), WORD))
        kind = context.get_value_type(part)
        nothing, suffix = ir.Constant(kind, None), f"v{lanes}i{values.dtype.bitwidth}"

        def load_then_expand(place, mask):
            data = builder.load(simd.pointer(context, builder, values, array, place, kind), align=1)
            function = ir.FunctionType(kind, [kind, kind, mask.type])
            expand = builder.module.declare_intrinsic(f"llvm.x86.avx512.mask.expand.{suffix}", (), function)
            return builder.call(expand, [simd.in_register(builder, data), nothing, mask])

        def expanding_load(place, mask):
            source = simd.pointer(context, builder, values, array, place, kind.element)
            function = ir.FunctionType(kind, [source.type, mask.type, kind])
            expand = builder.module.declare_intrinsic(f"llvm.masked.expandload.{suffix}", (), function)
            return builder.call(expand, [source, mask, nothing])

        def expanded(start: int):
            mask = bits if lanes == WORD else simd.take(builder, bits, range(start, start + lanes))
            return expand(_place(builder, at_value, word_value, start), mask)

        expand = load_then_expand if simd.has("avx512vbmi2") else expanding_load
        return simd.join(builder, [expanded(start) for start in range(0, WORD, lanes)])

    return Vector(values.dtype, WORD)(values, types.int64, types.uint32), generate


def _place(builder, at, word, start: int) -> ir.Value:
    """Where the values of the word's bits from `start` on begin."""
    before = builder.ctpop(builder.and_(word, I32((1 << start) - 1)))
    return builder.add(at, builder.zext(before, I64))

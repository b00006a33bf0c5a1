"""From a bitmap word to 32 lanes of a row: the step that every SIMD kernel here turns on.

`expand(values, at, word)` reads the next values and puts each in the lane of its set bit, with zeros between. It may
read, but never uses, up to `values[at + 31]`.
"""

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from toolkit.kernels import simd
from toolkit.kernels.bitmap.shared import WORD
from toolkit.kernels.simd import I32, I64, Vector

REGISTER = 16  # bytes that one byte shuffle moves
ABSENT = 0x80  # a shuffle index that gives a zero


@intrinsic
def by_shuffle(typing_context, values, at, word):
    """With SSSE3's byte shuffle: a table tells, for every pattern of 4 or 8 bits, where each byte goes."""
    width = values.dtype.bitwidth // 8
    lanes = min(REGISTER // width, 8)

    def generate(context, builder, signature, arguments):
        array, at_value, word_value = arguments
        table = simd.constant_table(builder, f"shuffles_{width}", shuffles(lanes, width))
        parts = []
        for start in range(0, WORD, lanes):
            pattern = builder.and_(builder.lshr(word_value, I32(start)), I32((1 << lanes) - 1))
            before = builder.ctpop(builder.and_(word_value, I32((1 << start) - 1)))
            place = builder.add(at_value, builder.zext(before, I64))
            parts.append(_shuffled(context, builder, values, array, place, table, pattern, lanes))
        return simd.join(builder, parts)

    return Vector(values.dtype, WORD)(values, types.int64, types.uint32), generate


def _shuffled(context, builder, values, array, place, table, pattern, lanes: int):
    size = lanes * values.dtype.bitwidth // 8
    some = ir.VectorType(ir.IntType(8), size)
    full = ir.VectorType(ir.IntType(8), REGISTER)
    data = builder.load(simd.pointer(context, builder, values, array, place, some), align=1)
    if size < REGISTER:
        data = simd.join(builder, [data, ir.Constant(some, None)])
    order = builder.load(builder.gep(table, [builder.zext(pattern, I64)]), align=REGISTER)
    shuffle = builder.module.declare_intrinsic("llvm.x86.ssse3.pshuf.b.128", (), ir.FunctionType(full, [full, full]))
    moved = builder.call(shuffle, [data, order])
    return builder.bitcast(simd.take(builder, moved, range(size)), vector_of(context, values.dtype, lanes))


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
    per_step = min(WORD, simd.CACHE_LINE * 8 // values.dtype.bitwidth)

    def generate(context, builder, signature, arguments):
        array, at_value, word_value = arguments
        bits = builder.bitcast(word_value, ir.VectorType(ir.IntType(1), WORD))
        parts, place = [], at_value
        for start in range(0, WORD, per_step):
            mask = bits if per_step == WORD else simd.take(builder, bits, range(start, start + per_step))
            parts.append(_expanded(context, builder, values, array, place, mask))
            before = builder.and_(word_value, I32((1 << start + per_step) - 1))
            place = builder.add(at_value, builder.zext(builder.ctpop(before), I64))
        return simd.join(builder, parts)

    return Vector(values.dtype, WORD)(values, types.int64, types.uint32), generate


def _expanded(context, builder, values, array, place, mask):
    kind = vector_of(context, values.dtype, mask.type.count)
    nothing = ir.Constant(kind, None)
    name = f"v{kind.count}i{values.dtype.bitwidth}"
    if simd.has("avx512vbmi2"):
        data = simd.in_register(
            builder, builder.load(simd.pointer(context, builder, values, array, place, kind), align=1)
        )
        signature = ir.FunctionType(kind, [kind, kind, mask.type])
        expand = builder.module.declare_intrinsic(f"llvm.x86.avx512.mask.expand.{name}", (), signature)
        return builder.call(expand, [data, nothing, mask])
    source = simd.pointer(context, builder, values, array, place, values_type(context, values.dtype))
    signature = ir.FunctionType(kind, [source.type, mask.type, kind])
    expand = builder.module.declare_intrinsic(f"llvm.masked.expandload.{name}", (), signature)
    return builder.call(expand, [source, mask, nothing])


def vector_of(context, element: types.Number, lanes: int) -> ir.VectorType:
    """The LLVM type of so many elements."""
    return context.get_value_type(Vector(element, lanes))


def values_type(context, element: types.Number) -> ir.Type:
    """The LLVM type of one element."""
    return context.get_value_type(element)

"""SIMD vectors for Numba: a type, and the few operations on it that the kernels use, as LLVM writes them.

`load`, `store` and the like take an array and an element's place in it and check no bounds. Lanes may exceed a
register: LLVM splits a vector into as many registers as the CPU needs. Functions that take a `builder` write LLVM code,
for intrinsics of this and other modules.
"""

from collections.abc import Callable, Sequence
from functools import cache

from llvmlite import binding, ir
from numba import types
from numba.core import cgutils, codegen, config
from numba.extending import intrinsic, models, register_model

from toolkit.kernels.engine.elements import ByType

I8, I16, I32, I64 = map(ir.IntType, (8, 16, 32, 64))
F16, F32 = ir.HalfType(), ir.FloatType()
CACHE_LINE = 64  # bytes
# prefetch distance for values that are read in bursts, since the hardware prefetcher does not keep up with bursts
PREFETCH_BYTES = 4096


class Vector(types.Type):
    """`lanes` numbers of one type."""

    def __init__(self, element: types.Number, lanes: int):
        self.element, self.lanes = element, lanes
        super().__init__(f"Vector({element}, {lanes})")


@register_model(Vector)
class VectorModel(models.PrimitiveModel):
    """An LLVM vector."""

    def __init__(self, manager, vector):
        element = manager.lookup(vector.element).get_value_type()
        super().__init__(manager, vector, ir.VectorType(element, vector.lanes))


def has(feature: str) -> bool:
    """Whether Numba compiles for CPUs with this feature (LLVM's name). Its environment can say that it must not."""
    features = codegen.get_host_cpu_features() if config.CPU_FEATURES is None else config.CPU_FEATURES
    return f"+{feature}" in features.split(",")


@cache
def host_has(feature: str) -> bool:
    """Whether this CPU has this feature (LLVM's name), and Numba compiles for it."""
    return binding.get_host_cpu_features().get(feature, False) and has(feature)


def pointer(context, builder, array_type, array, at, kind: ir.Type):
    """The address of `array.flat[at]`, as a pointer to `kind`."""
    data = context.make_array(array_type)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [at]), kind.as_pointer())


def call(builder, name: str, result: ir.Type, *arguments, **options) -> ir.Value:
    """The result of LLVM's intrinsic function `llvm.name`."""
    kind = ir.FunctionType(result, [argument.type for argument in arguments])
    return builder.call(builder.module.declare_intrinsic(f"llvm.{name}", (), kind), arguments, **options)


def in_all_lanes(builder, value, lanes: int) -> ir.Value:
    """A vector with the value in all lanes."""
    undefined = ir.Constant(ir.VectorType(value.type, lanes), ir.Undefined)
    first = builder.insert_element(undefined, value, I32(0))
    return builder.shuffle_vector(first, undefined, ir.Constant(ir.VectorType(I32, lanes), None))


def constant(kind: ir.VectorType, value: float) -> ir.Constant:
    """A constant with the value in all lanes."""
    return ir.Constant(kind, [value] * kind.count)


def multiply_add(builder, a, b, c) -> ir.Value:
    """a · b + c of fp32 vectors, rounded once."""
    return call(builder, f"fma.v{a.type.count}f32", a.type, a, b, c)


def in_register(builder, value) -> ir.Value:
    """The same vector, held in a register: LLVM may then not fold its load into the next instruction."""
    kind = ir.FunctionType(value.type, [value.type])
    return builder.asm(kind, "", "=v,0", [value], side_effect=False)


def take(builder, value, lanes) -> ir.Value:
    """The named lanes of a vector, as a shorter one."""
    indices = ir.Constant(ir.VectorType(I32, len(lanes)), list(lanes))
    return builder.shuffle_vector(value, ir.Constant(value.type, ir.Undefined), indices)


def join(builder, parts: Sequence[ir.Value]) -> ir.Value:
    """Vectors of one length, a power of two of them, one after another."""
    while len(parts) > 1:
        lanes = parts[0].type.count
        indices = ir.Constant(ir.VectorType(I32, 2 * lanes), list(range(2 * lanes)))
        pairs = zip(parts[::2], parts[1::2], strict=True)
        parts = [builder.shuffle_vector(low, high, indices) for low, high in pairs]
    return parts[0]


def halved(builder, value, width: int) -> ir.Value:
    """The sums of each `width` lanes, halved again and again."""
    while width > 1:
        low = [start + lane for start in range(0, value.type.count, width) for lane in range(width // 2)]
        high = [lane + width // 2 for lane in low]
        value, width = builder.fadd(take(builder, value, low), take(builder, value, high)), width // 2
    return value


def constant_table(builder, name: str, rows: list[list[int]]) -> ir.Value:
    """A pointer to the first of equally long byte vectors that live in the compiled module, aligned to their size."""
    row = ir.VectorType(I8, len(rows[0]))
    kind = ir.ArrayType(row, len(rows))
    try:
        table = builder.module.get_global(name)
    except KeyError:
        table = cgutils.global_constant(builder, name, ir.Constant(kind, [ir.Constant(row, r) for r in rows]))
        table.align = len(rows[0])
    return builder.bitcast(table, row.as_pointer())


@intrinsic(prefer_literal=True)
def load(typing_context, array, at, lanes):
    """The `lanes` elements from `at`, at any alignment."""
    vector = Vector(array.dtype, lanes.literal_value)

    def generate(context, builder, signature, arguments):
        kind = context.get_value_type(vector)
        return builder.load(pointer(context, builder, array, *arguments[:2], kind), align=array.dtype.bitwidth // 8)

    return vector(array, types.int64, lanes), generate


@intrinsic
def item(typing_context, array, at):
    """One element. Numba's own indexing would first test whether `at` is negative."""

    def generate(context, builder, signature, arguments):
        return builder.load(pointer(context, builder, array, *arguments, context.get_value_type(array.dtype)))

    return array.dtype(array, types.int64), generate


@intrinsic
def store(typing_context, array, at, vector):
    """Write the vector from `at` on, at any alignment."""

    def generate(context, builder, signature, arguments):
        value = arguments[2]
        place = pointer(context, builder, array, *arguments[:2], value.type)
        builder.store(value, place, align=array.dtype.bitwidth // 8)

    return types.void(array, types.int64, vector), generate


@intrinsic
def stream(typing_context, array, at, vector):
    """Write the vector past the caches, so that they need not read the line first. Whole vectors must be aligned to
    their size, or to a cache line if they are longer.
    """

    def generate(context, builder, signature, arguments):
        value, size = arguments[2], vector.lanes * vector.element.bitwidth // 8
        place = pointer(context, builder, array, *arguments[:2], value.type)
        written = builder.store(value, place, align=min(size, CACHE_LINE))
        written.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(I32, 1)]))

    return types.void(array, types.int64, vector), generate


def _prefetch(context, builder, array, data, at, locality: int) -> None:
    place = pointer(context, builder, array, data, at, I8)
    call(builder, "prefetch.p0", ir.VoidType(), place, I32(0), I32(locality), I32(1))  # to read; data, not code


def _prefetching(locality: int):
    @intrinsic
    def prefetch(typing_context, array, at):
        def generate(context, builder, signature, arguments):
            _prefetch(context, builder, array, *arguments, locality)
            return context.get_dummy_value()

        return types.void(array, types.int64), generate

    @intrinsic
    def prefetch_rows(typing_context, array, starts, column):
        def generate(context, builder, signature, arguments):
            data, places, offset = arguments
            for start in cgutils.unpack_tuple(builder, places, starts.count):
                _prefetch(context, builder, array, data, builder.add(start, offset), locality)
            return context.get_dummy_value()

        return types.void(array, starts, types.int64), generate

    return prefetch, prefetch_rows


# ask all caches, or the second one, for the line that holds array.flat[at], which may lie beyond the array's end;
# `_rows`: for the lines that hold array.flat[start + column], for each start of a tuple
prefetch, prefetch_rows = _prefetching(3)
prefetch_l2, prefetch_l2_rows = _prefetching(2)


@intrinsic
def fence(typing_context):
    """Make all writes of `stream` visible before any later write."""

    def generate(context, builder, signature, arguments):
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic(prefer_literal=True)
def zeros(typing_context, lanes):
    """An fp32 vector of zeros."""
    vector = Vector(types.float32, lanes.literal_value)
    return vector(lanes), lambda context, *_: ir.Constant(context.get_value_type(vector), None)


@intrinsic(prefer_literal=True)
def splat(typing_context, value, lanes):
    """An fp32 vector with the value in all lanes."""
    vector = Vector(types.float32, lanes.literal_value)
    return vector(types.float32, lanes), lambda context, builder, signature, arguments: in_all_lanes(
        builder, arguments[0], vector.lanes
    )


def _to_floats(convert: Callable):
    """The intrinsic that makes fp32 of a vector; `convert` writes it, given the vector and how fp32 is laid out."""

    @intrinsic
    def lanes_to_float32(typing_context, vector):
        floats = ir.VectorType(F32, vector.lanes)
        return Vector(types.float32, vector.lanes)(vector), lambda context, builder, signature, arguments: convert(
            builder, arguments[0], floats
        )

    return lanes_to_float32


def _from_bfloat16(builder, bits, floats) -> ir.Value:
    wide = builder.zext(bits, ir.VectorType(I32, floats.count))
    return builder.bitcast(builder.shl(wide, constant(wide.type, 16)), floats)


def _from_float16(builder, bits, floats) -> ir.Value:
    return builder.fpext(builder.bitcast(bits, ir.VectorType(F16, floats.count)), floats)


def _from_float32(builder, bits, floats) -> ir.Value:
    return builder.bitcast(bits, floats)


def _from_int8(builder, bits, floats) -> ir.Value:
    return builder.sitofp(builder.sext(bits, ir.VectorType(I32, floats.count)), floats)


# what makes fp32 of a vector of a type's bits
LANES_TO_FLOAT32 = ByType(
    float32=_to_floats(_from_float32),
    float16=_to_floats(_from_float16),
    bfloat16=_to_floats(_from_bfloat16),
    int8=_to_floats(_from_int8),
)


@intrinsic
def fma(typing_context, a, b, c):
    """a · b + c of fp32 vectors, rounded once."""
    return a(a, a, a), lambda context, builder, signature, arguments: multiply_add(builder, *arguments)


@intrinsic
def total(typing_context, vector):
    """The sum over the lanes, halved again and again."""
    return vector.element(vector), lambda context, builder, signature, arguments: builder.extract_element(
        halved(builder, arguments[0], vector.lanes), I32(0)
    )


@intrinsic(prefer_literal=True)
def totals(typing_context, sums, lanes):
    """The sum of each so many lanes, halved again and again."""
    width = lanes.literal_value
    return Vector(sums.element, sums.lanes // width)(
        sums, lanes
    ), lambda context, builder, signature, arguments: halved(builder, arguments[0], width)

"""SIMD vectors for Numba: a type, and the few operations on it that the kernels use, as LLVM writes them.

`load`, `store` and the like take an array and an element's place in it and check no bounds. Lanes may exceed a
register: LLVM splits a vector into as many registers as the CPU needs.
"""

from functools import cache

from llvmlite import binding, ir
from numba import types
from numba.core import cgutils, config
from numba.extending import intrinsic, models, register_model

I32, I64 = ir.IntType(32), ir.IntType(64)
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
    """Whether code is being made for a CPU with this feature (LLVM's name)."""
    if config.CPU_FEATURES is not None:
        return f"+{feature}" in config.CPU_FEATURES.split(",")
    return host_has(feature)


@cache
def host_has(feature: str) -> bool:
    """Whether this CPU has this feature (LLVM's name)."""
    return binding.get_host_cpu_features().get(feature, False)


def pointer(context, builder, array_type, array, at, kind: ir.Type):
    """The address of `array.flat[at]`, as a pointer to `kind`."""
    data = context.make_array(array_type)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [at]), kind.as_pointer())


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
        array_value, at_value, value = arguments
        place = pointer(context, builder, array, array_value, at_value, value.type)
        builder.store(value, place, align=array.dtype.bitwidth // 8)

    return types.void(array, types.int64, vector), generate


@intrinsic
def stream(typing_context, array, at, vector):
    """Write the vector past the caches, so that they need not read the line first. Whole vectors must be aligned to
    their size, or to a cache line if they are longer.
    """

    def generate(context, builder, signature, arguments):
        array_value, at_value, value = arguments
        size = vector.lanes * vector.element.bitwidth // 8
        place = pointer(context, builder, array, array_value, at_value, value.type)
        written = builder.store(value, place, align=min(size, CACHE_LINE))
        written.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(I32, 1)]))

    return types.void(array, types.int64, vector), generate


@intrinsic
def prefetch(typing_context, array, at):
    """Ask all caches for the line that holds this element, which may lie beyond the array's end."""
    return types.void(array, types.int64), _prefetch_into(array, 3)


@intrinsic
def prefetch_l2(typing_context, array, at):
    """Ask the second cache for the line that holds this element, which may lie beyond the array's end."""
    return types.void(array, types.int64), _prefetch_into(array, 2)


def _prefetch_into(array, locality: int):
    def generate(context, builder, signature, arguments):
        place = pointer(context, builder, array, *arguments, ir.IntType(8))
        kind = ir.FunctionType(ir.VoidType(), [place.type, I32, I32, I32])
        ask = builder.module.declare_intrinsic("llvm.prefetch.p0", (), kind)
        builder.call(ask, [place, I32(0), I32(locality), I32(1)])  # to read; data, not code
        return context.get_dummy_value()

    return generate


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

    def generate(context, builder, signature, arguments):
        return ir.Constant(context.get_value_type(vector), None)

    return vector(lanes), generate


@intrinsic(prefer_literal=True)
def splat(typing_context, value, lanes):
    """An fp32 vector with the value in all lanes."""
    vector = Vector(types.float32, lanes.literal_value)

    def generate(context, builder, signature, arguments):
        kind = context.get_value_type(vector)
        first = builder.insert_element(ir.Constant(kind, ir.Undefined), arguments[0], I32(0))
        return builder.shuffle_vector(first, first, ir.Constant(ir.VectorType(I32, vector.lanes), None))

    return vector(types.float32, lanes), generate


@intrinsic
def bfloat16_lanes(typing_context, vector):
    """bf16 bits to fp32."""

    def generate(context, builder, signature, arguments):
        wide = builder.zext(arguments[0], ir.VectorType(ir.IntType(32), vector.lanes))
        return builder.bitcast(builder.shl(wide, ir.Constant(wide.type, [16] * vector.lanes)), _floats(vector.lanes))

    return Vector(types.float32, vector.lanes)(vector), generate


@intrinsic
def float16_lanes(typing_context, vector):
    """fp16 bits to fp32."""

    def generate(context, builder, signature, arguments):
        halves = builder.bitcast(arguments[0], ir.VectorType(ir.HalfType(), vector.lanes))
        return builder.fpext(halves, _floats(vector.lanes))

    return Vector(types.float32, vector.lanes)(vector), generate


@intrinsic
def float32_lanes(typing_context, vector):
    """fp32 bits to fp32."""

    def generate(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], _floats(vector.lanes))

    return Vector(types.float32, vector.lanes)(vector), generate


@intrinsic
def int8_lanes(typing_context, vector):
    """Signed bytes to fp32."""

    def generate(context, builder, signature, arguments):
        wide = builder.sext(arguments[0], ir.VectorType(ir.IntType(32), vector.lanes))
        return builder.sitofp(wide, _floats(vector.lanes))

    return Vector(types.float32, vector.lanes)(vector), generate


@intrinsic
def fma(typing_context, a, b, c):
    """a · b + c of fp32 vectors, rounded once."""

    def generate(context, builder, _signature, arguments):
        kind = arguments[0].type
        signature = ir.FunctionType(kind, [kind] * 3)
        return builder.call(builder.module.declare_intrinsic(f"llvm.fma.v{a.lanes}f32", (), signature), arguments)

    return a(a, a, a), generate


@intrinsic
def total(typing_context, vector):
    """The sum over the lanes, halved again and again."""

    def generate(context, builder, signature, arguments):
        (value,) = arguments
        lanes = vector.lanes
        while lanes > 1:
            lanes //= 2
            low, high = (take(builder, value, range(start, start + lanes)) for start in (0, lanes))
            value = builder.fadd(low, high)
        return builder.extract_element(value, I32(0))

    return vector.element(vector), generate


def in_register(builder, value) -> ir.Value:
    """The same vector, held in a register: LLVM may then not fold its load into the next instruction."""
    kind = ir.FunctionType(value.type, [value.type])
    return builder.asm(kind, "", "=v,0", [value], side_effect=False)


def take(builder, value, lanes) -> ir.Value:
    """The named lanes of a vector, as a shorter one."""
    indices = ir.Constant(ir.VectorType(I32, len(lanes)), list(lanes))
    return builder.shuffle_vector(value, ir.Constant(value.type, ir.Undefined), indices)


def join(builder, parts: list[ir.Value]) -> ir.Value:
    """Vectors of one length, a power of two of them, one after another."""
    while len(parts) > 1:
        lanes = parts[0].type.count
        indices = ir.Constant(ir.VectorType(I32, 2 * lanes), list(range(2 * lanes)))
        pairs = zip(parts[::2], parts[1::2], strict=True)
        parts = [builder.shuffle_vector(low, high, indices) for low, high in pairs]
    return parts[0]


def constant_table(builder, name: str, rows: list[list[int]]) -> ir.Value:
    """A pointer to the first of equally long byte vectors that live in the compiled module, aligned to their size."""
    row = ir.VectorType(ir.IntType(8), len(rows[0]))
    kind = ir.ArrayType(row, len(rows))
    try:
        table = builder.module.get_global(name)
    except KeyError:
        table = cgutils.global_constant(builder, name, ir.Constant(kind, [ir.Constant(row, r) for r in rows]))
        table.align = len(rows[0])
    return builder.bitcast(table, row.as_pointer())


def _floats(lanes: int) -> ir.VectorType:
    return ir.VectorType(ir.FloatType(), lanes)

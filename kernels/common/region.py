"""A parallel region of OpenMP around a compiled function of rows.

`run_region` does what a C compiler makes of

    long next = 0, failed = 0;
    #pragma omp parallel num_threads(threads)
    for (long part; (part = atomic_fetch_add(&next, 1)) < parts; )
        if (kernel(arguments..., rows * part / parts, rows * (part + 1) / parts) != OK) failed = 1;
"""

from llvmlite import ir
from numba import types
from numba.core import callconv, cgutils
from numba.extending import intrinsic

from toolkit.kernels.common.compiled import compiled

I32, I64 = ir.IntType(32), ir.IntType(64)
POINTER = ir.IntType(8).as_pointer()
NEXT, FAILED, KERNEL, ROWS, PARTS, ARGUMENTS = range(6)  # fields of what the threads share


@intrinsic
def _region(typing_context, fork, threads, kernel, rows, parts, arguments):
    def generate(context, builder, signature, values):
        fork, threads, kernel, rows, parts, given = values
        shared = ir.LiteralStructType([I64, I64, I64, I64, I64, given.type])
        place = cgutils.alloca_once(builder, shared)
        for field, value in enumerate((I64(0), I64(0), kernel, rows, parts, given)):
            builder.store(value, _field(builder, place, field))
        body = _body(context, builder.module, f"{builder.function.name}.region", shared, signature.args[ARGUMENTS])
        kind = ir.FunctionType(ir.VoidType(), [body.type, POINTER, I32, I32])
        begin = builder.inttoptr(fork, kind.as_pointer())
        builder.call(begin, [body, builder.bitcast(place, POINTER), builder.trunc(threads, I32), I32(0)])
        return builder.load(_field(builder, place, FAILED))

    return types.int64(types.int64, types.int64, types.int64, types.int64, types.int64, arguments), generate


def _body(context, module: ir.Module, name: str, shared: ir.Type, kinds: types.BaseTuple) -> ir.Function:
    """What each thread runs: part after part, until none is left."""
    body = ir.Function(module, ir.FunctionType(ir.VoidType(), [POINTER]), name)
    body.linkage = "internal"
    builder = ir.IRBuilder(body.append_basic_block("entry"))
    place = builder.bitcast(body.args[0], shared.as_pointer())
    address, rows, parts, given = (builder.load(_field(builder, place, field)) for field in range(KERNEL, 6))
    call = _caller(context, builder, address, kinds, given)
    take, work, end = (body.append_basic_block(block) for block in ("take", "work", "end"))
    builder.branch(take)
    builder.position_at_end(take)
    part = builder.atomic_rmw("add", _field(builder, place, NEXT), I64(1), "monotonic")
    builder.cbranch(builder.icmp_signed("<", part, parts), work, end)
    builder.position_at_end(work)
    first, last = (builder.sdiv(builder.mul(rows, number), parts) for number in (part, builder.add(part, I64(1))))
    with builder.if_then(builder.icmp_signed("!=", call(first, last), callconv.RETCODE_OK), likely=False):
        builder.store_atomic(I64(1), _field(builder, place, FAILED), "monotonic", 8)
    builder.branch(take)
    builder.position_at_end(end)
    builder.ret_void()
    return body


def _caller(context, builder, address, kinds: types.BaseTuple, given):
    """How a compiled function is called by its address: Numba's convention, which returns a code."""
    every = (*kinds.types, types.int64, types.int64)
    kind = context.call_conv.get_function_type(types.none, every)
    function = builder.inttoptr(address, kind.as_pointer())
    result, error = (builder.alloca(argument.pointee) for argument in kind.args[:2])
    values = cgutils.unpack_tuple(builder, given)

    def call(first, last):
        packed = context.get_arg_packer(every).as_arguments(builder, [*values, first, last])
        return builder.call(function, [result, error, *packed])

    return call


def _field(builder, place, field: int):
    return builder.gep(place, [I32(0), I32(field)], inbounds=True)


@compiled
def run_region(fork, threads, kernel, rows, parts, *arguments):
    """Run `kernel(*arguments, first, last)` for so many `parts` of the rows on so many threads; 0 if none failed.

    `fork` is the address of `GOMP_parallel`, and `kernel` that of the machine code which Numba made for these
    arguments and two int64. Addresses are given at each call, so that none is in the compiled code.
    """
    return _region(fork, threads, kernel, rows, parts, arguments)

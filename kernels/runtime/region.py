"""Parallel regions of OpenMP around compiled functions of rows.

`run_region` does what a C compiler makes of

    long next = 0, failed = 0;
    #pragma omp parallel num_threads(threads)
    for (long part; (part = atomic_fetch_add(&next, 1)) < parts; )
        if (kernel(arguments..., rows * part / parts, rows * (part + 1) / parts) != OK) failed = 1;

`run_stages` does the same for a table of parts, each of a kernel whose arguments `bind` has stored beforehand. They
belong to stages that follow each other within one region:

    for (long part; (part = atomic_fetch_add(&next, 1)) < parts; atomic_fetch_add(&finished, 1))
        { await(finished >= the parts of earlier stages); if (!failed) run(part); }
    await(finished >= parts);

Waking a thread that sleeps takes some 50 microseconds, as long as a small product. So threads that await each other
spin for about as long, and then let other processes run (`sched_yield`) until it is their turn.
"""

import platform

from llvmlite import ir
from numba import types
from numba.core import callconv, cgutils
from numba.extending import intrinsic

from toolkit.kernels.runtime.compiled import compiled

I32, I64 = ir.IntType(32), ir.IntType(64)
POINTER = ir.IntType(8).as_pointer()
NEXT, FAILED, KERNEL, ROWS, PARTS, ARGUMENTS = range(6)  # fields of what the threads of `run_region` share
TABLE, ENDS, COUNT, FINISHED = range(2, 6)  # and, behind `NEXT` and `FAILED`, those of `run_stages`
SPINS = 2000  # looks at what has finished, before a thread gives way
TASK, FIRST, LAST = range(3)  # the columns of a table of parts
TASK_WORDS = 2  # in front of a task's arguments: the function that calls its kernel, and the kernel
TASK_FUNCTION = ir.FunctionType(I64, [POINTER, I64, I64])


@intrinsic
def _region(typing_context, fork, threads, kernel, rows, parts, arguments):
    def generate(context, builder, signature, values):
        fork, threads, kernel, rows, parts, given = values
        shared = _shared(builder, (I64(0), I64(0), kernel, rows, parts, given))

        def run(builder, place, part):
            fields = (builder.load(_field(builder, place, field)) for field in range(KERNEL, 6))
            address, rows, parts, given = fields
            call = _caller(context, builder, address, signature.args[ARGUMENTS], cgutils.unpack_tuple(builder, given))
            ends = (builder.mul(rows, number) for number in (part, builder.add(part, I64(1))))
            return call(*(builder.sdiv(end, parts) for end in ends))

        _fork(builder, fork, threads, _body(builder, shared, run), shared)
        return builder.load(_field(builder, shared, FAILED))

    return types.int64(types.int64, types.int64, types.int64, types.int64, types.int64, arguments), generate


@intrinsic
def _stages(typing_context, fork, threads, table, ends, count):
    """Run the parts of a table on a team of threads, stage after stage."""

    def generate(context, builder, signature, values):
        fork, threads, table, ends, count = values
        shared = _shared(builder, (I64(0), I64(0), table, ends, count, I64(0)))
        _fork(builder, fork, threads, _stages_body(builder, shared), shared)
        return builder.load(_field(builder, shared, FAILED))

    return types.int64(*[types.int64] * 5), generate


@intrinsic
def _part(typing_context, table, part):
    """Run one part of a table."""

    def generate(context, builder, signature, values):
        return _part_of(builder, *values)

    return types.int64(types.int64, types.int64), generate


@intrinsic
def _word(typing_context, address, place):
    """The 64-bit word number `place` behind an address."""

    def generate(context, builder, signature, values):
        return builder.load(builder.gep(builder.inttoptr(values[0], I64.as_pointer()), [values[1]]))

    return types.int64(types.int64, types.int64), generate


def _binding(ranged: bool):
    """The intrinsic that stores a kernel and its arguments; `ranged` kernels also take the first row and the last."""

    @intrinsic
    def bind(typing_context, task, kernel, arguments):
        def generate(context, builder, signature, values):
            kinds, given = signature.args[2], cgutils.unpack_tuple(builder, values[2])
            given = [_borrowed(builder, *pair) for pair in zip(kinds.types, given, strict=True)]
            task = ir.LiteralStructType([I64, I64, *(value.type for value in given)])
            function = _task_function(context, builder, task, kinds, ranged)
            place = builder.inttoptr(values[0], task.as_pointer())
            for field, value in enumerate((builder.ptrtoint(function, I64), values[1], *given)):
                builder.store(value, _field(builder, place, field), align=4)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64, arguments), generate

    return bind


def _borrowed(builder, kind: types.Type, value):
    """An array without its owner, which whoever binds it keeps: a kernel counts no references then."""
    if not isinstance(kind, types.Array):
        return value
    nobody = ir.Constant(POINTER, None)
    return builder.insert_value(builder.insert_value(value, nobody, 0), nobody, 1)


def _task_function(context, builder, task: ir.Type, kinds: types.BaseTuple, ranged: bool) -> ir.Function:
    """The function that calls a task's kernel for some rows, and returns 1 if it failed."""
    function = ir.Function(builder.module, TASK_FUNCTION, f"{builder.function.name}.task")
    function.linkage = "internal"
    builder = ir.IRBuilder(function.append_basic_block("entry"))
    place = builder.bitcast(function.args[0], task.as_pointer())
    kernel, *given = (
        builder.load(_field(builder, place, field), align=4) for field in range(1, TASK_WORDS + len(kinds))
    )
    call = _caller(context, builder, kernel, kinds, given)
    builder.ret(builder.zext(call(*function.args[1:]) if ranged else call(), I64))
    return function


def _part_of(builder, table, part):
    row = builder.gep(builder.inttoptr(table, I64.as_pointer()), [builder.mul(part, I64(3))])
    task, first, last = (builder.load(builder.gep(row, [I64(column)])) for column in (TASK, FIRST, LAST))
    function = builder.load(builder.inttoptr(task, TASK_FUNCTION.as_pointer().as_pointer()))
    return builder.call(function, [builder.inttoptr(task, POINTER), first, last])


def _shared(builder, values: tuple):
    """The memory that the threads share, filled with these values."""
    place = cgutils.alloca_once(builder, ir.LiteralStructType([value.type for value in values]))
    for field, value in enumerate(values):
        builder.store(value, _field(builder, place, field))
    return place


def _fork(builder, fork, threads, body: ir.Function, shared) -> None:
    """Call `GOMP_parallel` with what each thread runs."""
    kind = ir.FunctionType(ir.VoidType(), [body.type, POINTER, I32, I32])
    begin = builder.inttoptr(fork, kind.as_pointer())
    builder.call(begin, [body, builder.bitcast(shared, POINTER), builder.trunc(threads, I32), I32(0)])


def _thread(builder, shared) -> tuple[ir.Function, ir.IRBuilder, ir.Value]:
    """The function that each thread runs, its builder, and the place of what the threads share."""
    name = f"{builder.function.name}.region"
    body = ir.Function(builder.module, ir.FunctionType(ir.VoidType(), [POINTER]), name)
    body.linkage = "internal"
    inside = ir.IRBuilder(body.append_basic_block("entry"))
    return body, inside, inside.bitcast(body.args[0], shared.type)


def _body(outside, shared, run) -> ir.Function:
    """Take part after part, until all are taken."""
    body, builder, place = _thread(outside, shared)
    take, work, done = (body.append_basic_block(block) for block in ("take", "work", "done"))
    builder.branch(take)
    builder.position_at_end(take)
    part = builder.atomic_rmw("add", _field(builder, place, NEXT), I64(1), "monotonic")
    parts = builder.load(_field(builder, place, PARTS))
    builder.cbranch(builder.icmp_signed("<", part, parts), work, done)
    builder.position_at_end(work)
    with builder.if_then(run(builder, place, part), likely=False):
        builder.store_atomic(I64(1), _field(builder, place, FAILED), "monotonic", 8)
    builder.branch(take)
    builder.position_at_end(done)
    builder.ret_void()
    return body


def _stages_body(outside, shared) -> ir.Function:
    """Take part after part, and run each when the stages before its own have ended. Return when all parts have."""
    body, builder, place = _thread(outside, shared)
    take, find, later, work, run, counted, done = (
        body.append_basic_block(block) for block in ("take", "find", "later", "work", "run", "counted", "done")
    )
    ends = builder.inttoptr(builder.load(_field(builder, place, ENDS)), I64.as_pointer())
    count = builder.load(_field(builder, place, COUNT))
    stage, earlier = (cgutils.alloca_once_value(builder, I64(0)) for _ in range(2))

    def end_of(number):  # `ends` has two columns
        return builder.load(builder.gep(ends, [builder.mul(number, I64(2))]))

    total = end_of(builder.sub(count, I64(1)))
    builder.branch(take)
    builder.position_at_end(take)
    part = builder.atomic_rmw("add", _field(builder, place, NEXT), I64(1), "monotonic")
    builder.cbranch(builder.icmp_signed("<", part, total), find, done)
    builder.position_at_end(find)
    number = builder.load(stage)
    end = end_of(number)
    builder.cbranch(builder.icmp_signed("<", part, end), work, later)
    builder.position_at_end(later)
    builder.store(end, earlier)
    builder.store(builder.add(number, I64(1)), stage)
    builder.branch(find)
    builder.position_at_end(work)
    _await(builder, place, builder.load(earlier))
    failed = builder.load_atomic(_field(builder, place, FAILED), "monotonic", 8)
    builder.cbranch(builder.icmp_signed("==", failed, I64(0)), run, counted)
    builder.position_at_end(run)
    fails = _part_of(builder, builder.load(_field(builder, place, TABLE)), part)
    with builder.if_then(builder.trunc(fails, ir.IntType(1)), likely=False):
        builder.store_atomic(I64(1), _field(builder, place, FAILED), "monotonic", 8)
    builder.branch(counted)
    builder.position_at_end(counted)
    builder.atomic_rmw("add", _field(builder, place, FINISHED), I64(1), "acq_rel")
    builder.branch(take)
    builder.position_at_end(done)
    _await(builder, place, total)  # awake, so that the team's own end puts nobody to sleep
    builder.ret_void()
    return body


def _await(builder, place, wanted) -> None:
    """Wait until so many parts have finished; the builder goes on behind that."""
    body = builder.function
    look, wait, spin, give_way, ready = (
        body.append_basic_block(block) for block in ("look", "wait", "spin", "give_way", "ready")
    )
    looks = cgutils.alloca_once(builder, I64)
    builder.store(I64(0), looks)
    builder.branch(look)
    builder.position_at_end(look)
    finished = builder.load_atomic(_field(builder, place, FINISHED), "acquire", 8)
    builder.cbranch(builder.icmp_signed(">=", finished, wanted), ready, wait)
    builder.position_at_end(wait)
    number = builder.add(builder.load(looks), I64(1))
    builder.store(number, looks)
    builder.cbranch(builder.icmp_signed("<", number, I64(SPINS)), spin, give_way)
    builder.position_at_end(spin)
    if platform.machine() in ("x86_64", "AMD64"):
        builder.call(
            builder.module.declare_intrinsic("llvm.x86.sse2.pause", (), ir.FunctionType(ir.VoidType(), [])), ()
        )
    builder.branch(look)
    builder.position_at_end(give_way)
    builder.call(cgutils.get_or_insert_function(builder.module, ir.FunctionType(I32, []), "sched_yield"), ())
    builder.branch(look)
    builder.position_at_end(ready)


def _caller(context, builder, address, kinds: types.BaseTuple, values: list):
    """How a compiled function is called by its address, for a range of rows or without one: 1 if it fails.

    Numba's convention is that it returns a code.
    """

    def call(*rows):
        every = (*kinds.types, *[types.int64] * len(rows))
        kind = context.call_conv.get_function_type(types.none, every)
        function = builder.inttoptr(address, kind.as_pointer())
        with builder.goto_entry_block():
            result, error = (builder.alloca(argument.pointee) for argument in kind.args[:2])
        packed = context.get_arg_packer(every).as_arguments(builder, [*values, *rows])
        return builder.icmp_signed("!=", builder.call(function, [result, error, *packed]), callconv.RETCODE_OK)

    return call


def _field(builder, place, field: int):
    return builder.gep(place, [I32(0), I32(field)], inbounds=True)


_bind_ranged, _bind_whole = _binding(True), _binding(False)


@compiled
def run_region(fork, threads, kernel, rows, parts, *arguments):
    """Run `kernel(*arguments, first, last)` for so many `parts` of the rows on so many threads; 0 if none failed.

    `fork` is the address of `GOMP_parallel`, and `kernel` that of the machine code which Numba made for these
    arguments and two int64. Addresses are given at each call, so that none is in the compiled code.
    """
    return _region(fork, threads, kernel, rows, parts, arguments)


@compiled
def bind(task, kernel, *arguments):
    """Store what calls `kernel(*arguments, first, last)` in the memory at the address `task`.

    It takes `TASK_WORDS` words of 64 bits, and those of the arguments as Numba holds them. The arrays must stay.
    """
    _bind_ranged(task, kernel, arguments)


@compiled
def bind_whole(task, kernel, *arguments):
    """Store what calls `kernel(*arguments)`, as `bind` does."""
    _bind_whole(task, kernel, arguments)


@compiled
def run_stages(fork, threads, table, stages, count):
    """Run the parts of a table, stage after stage; 0 if none failed, else what follows is left out.

    `table` is the address of int64 [parts, 3]: a task that `bind` stored, the first of its rows and the last. `stages`
    is the address of int64 [count, 2]: where the parts of each stage end, and how many threads it is worth.
    """
    team = 1
    for stage in range(count):
        team = max(team, min(threads, _word(stages, 2 * stage + 1)))
    if team > 1:
        return _stages(fork, team, table, stages, count)
    first, failed = 0, 0
    for stage in range(count):
        end = _word(stages, 2 * stage)
        for part in range(first, end):
            failed |= _part(table, part)
        if failed:
            return failed
        first = end
    return failed

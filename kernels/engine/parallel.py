"""Compiled functions of rows on the threads that torch uses: one by one, or many that follow each other.

torch and the kernels take turns, so they share one team of OpenMP threads. Two teams would compete for the cores, and a
thread that has just worked for torch is still awake for a kernel. Numba's threading layer would be a second team, and
it aborts when two Python threads enter it at once. One setting (`torch.set_num_threads`, `OMP_NUM_THREADS`) holds for
the whole process. Where torch brings no such team, and in a forked child, one thread does all.

A call of a compiled function from Python looks up the types of its arguments and unpacks the arrays, which costs more
than a small product. A `Program` does that once. Then a single call runs all of it:

    product = Product(Task(kernel, (weight, x, y), rows, weight.nbytes))
    program = Program(stages([product, another]))
    x[:] = ...
    program.run()     # y holds the product

Each thread takes the next part of the rows when it is done with one, so a slow core does not hold up the others. A part
waits until all parts of earlier stages have ended. Waking a thread that sleeps takes some 50 microseconds, as long as a
small product. So waiting threads spin for about as long. After that they yield the core to other processes until their
turn comes.
"""

import ctypes
import itertools
import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial

import numba
import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.core import callconv, cgutils
from numba.core.dispatcher import Dispatcher
from numba.extending import intrinsic

from toolkit.kernels.engine.compiled import compiled

# for less work, calling a second thread costs more than it saves
ROWS_WORTH_BYTES = 64 * 1024
PARTS = 4  # of the rows for each thread: one that another process holds up leaves the rest to the others
SPINS = 2000  # looks at what has finished, before a thread gives way
PROCESS = os.getpid()

I32, I64 = ir.IntType(32), ir.IntType(64)
# what the threads of a team share, in words of 64 bits. `TABLE` is the address of [parts, 3]: a bound task, its first
# row and its last; `ENDS` that of [stages]: where the parts of each stage end.
NEXT, FAILED, FINISHED, TABLE, ENDS, STAGES = range(6)
# and a bound task: the machine code that unpacks the arguments, that of the kernel, and the arguments
UNPACKS, KERNEL, ARGUMENTS = range(3)

sched_yield = types.ExternalFunction("sched_yield", types.int32())


def _pointer(builder, address, place):
    return builder.gep(builder.inttoptr(address, I64.as_pointer()), [place])


@intrinsic
def word(typing_context, address, place):
    """The 64-bit word number `place` behind an address, with all that was written before it was."""
    return types.int64(types.int64, types.int64), lambda context, builder, signature, values: builder.load_atomic(
        _pointer(builder, *values), "acquire", 8
    )


@intrinsic
def add(typing_context, address, place, value):
    """Add to a word behind an address, atomically, and return what it was."""
    return types.int64(*[types.int64] * 3), lambda context, builder, signature, values: builder.atomic_rmw(
        "add", _pointer(builder, *values[:2]), values[2], "acq_rel"
    )


@intrinsic
def pause(typing_context):
    """Tell the processor that this is a loop that waits."""

    def generate(context, builder, signature, values):
        if platform.machine() in ("x86_64", "AMD64"):
            kind = ir.FunctionType(ir.VoidType(), [])
            builder.call(builder.module.declare_intrinsic("llvm.x86.sse2.pause", (), kind), ())
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def invoke(typing_context, function, task, first, last):
    """Call the C function at an address with three integers; it returns one."""

    def generate(context, builder, signature, values):
        kind = ir.FunctionType(I64, [I64] * 3)
        return builder.call(builder.inttoptr(values[0], kind.as_pointer()), values[1:])

    return types.int64(*[types.int64] * 4), generate


def _binding(ranged: bool):
    """The intrinsic that stores a kernel and its arguments as a bound task; `ranged` kernels take two rows, too.

    It writes the function that calls the kernel with what is stored, and returns 1 if that fails.
    """

    @intrinsic
    def bind(typing_context, task, kernel, arguments):
        def generate(context, builder, signature, values):
            kinds, given = signature.args[2].types, cgutils.unpack_tuple(builder, values[2])
            owner = ir.Constant(ir.IntType(8).as_pointer(), None)  # whoever binds an array keeps it: nobody counts
            given = [
                builder.insert_value(builder.insert_value(value, owner, 0), owner, 1)
                if isinstance(kind, types.Array)
                else value
                for kind, value in zip(kinds, given, strict=True)
            ]
            place = builder.inttoptr(values[0], ir.LiteralStructType([I64, I64, *(v.type for v in given)]).as_pointer())
            function = _unpacking(context, builder, place.type, kinds)
            for number, value in enumerate((builder.ptrtoint(function, I64), values[1], *given)):
                builder.store(value, builder.gep(place, [I32(0), I32(number)]), align=1)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64, arguments), generate

    def _unpacking(context, outside, place: ir.Type, kinds: Sequence[types.Type]) -> ir.Function:
        name = f"{outside.function.name}.task"
        function = ir.Function(outside.module, ir.FunctionType(I64, [I64] * 3), name)
        function.linkage = "internal"
        builder = ir.IRBuilder(function.append_basic_block("entry"))
        task, *rows = builder.inttoptr(function.args[0], place), *function.args[1:]
        address, *given = (
            builder.load(builder.gep(task, [I32(0), I32(number)]), align=1) for number in range(1, 2 + len(kinds))
        )
        every = (*kinds, *[types.int64] * (2 * ranged))
        kind = context.call_conv.get_function_type(types.none, every)
        result, error = (builder.alloca(argument.pointee) for argument in kind.args[:2])
        packed = context.get_arg_packer(every).as_arguments(builder, [*given, *rows[: 2 * ranged]])
        code = builder.call(builder.inttoptr(address, kind.as_pointer()), [result, error, *packed])
        builder.ret(builder.zext(builder.icmp_signed("!=", code, callconv.RETCODE_OK), I64))
        return function

    return bind


_bind_ranged, _bind_whole = _binding(True), _binding(False)


@compiled
def bind_ranged(task, kernel, *arguments):
    """Store `kernel(*arguments, first, last)` at the address `task`; the arrays must stay."""
    _bind_ranged(task, kernel, arguments)


@compiled
def bind_whole(task, kernel, *arguments):
    """Store `kernel(*arguments)` at the address `task`; the arrays must stay."""
    _bind_whole(task, kernel, arguments)


@compiled
def lay_out(shared, kernel, rows, parts, *arguments):
    """Fill what a team shares for so many parts of the rows of one kernel: its words, one end, the table, the task."""
    place, first = shared.ctypes.data, STAGES + 2
    task = place + 8 * (first + 3 * parts)
    shared[: FINISHED + 1] = 0
    shared[TABLE], shared[ENDS], shared[STAGES] = place + 8 * first, place + 8 * (STAGES + 1), 1
    shared[STAGES + 1] = parts
    for part in range(parts):
        at = first + 3 * part
        shared[at], shared[at + 1], shared[at + 2] = task, rows * part // parts, rows * (part + 1) // parts
    _bind_ranged(task, kernel, arguments)
    return place


def words_of(arguments: Sequence[object]) -> int:
    """Words of 64 bits that a bound task takes, at most: arrays as Numba holds them, and numbers."""
    return ARGUMENTS + sum(5 + 2 * value.ndim if isinstance(value, np.ndarray) else 1 for value in arguments)


@numba.njit(inline="always")
def wait(shared, parts):
    """Return when so many parts have finished."""
    looks = 0
    while word(shared, FINISHED) < parts:
        looks += 1
        if looks < SPINS:
            pause()
        else:
            sched_yield()


@compiled
def work(shared):
    """The work of each thread of a team: take part after part, and run each when the stages before its own have ended.

    After a failure no further kernel is called.
    """
    table, ends = word(shared, TABLE), word(shared, ENDS)
    stage, earlier, total = 0, 0, word(ends, word(shared, STAGES) - 1)
    part = add(shared, NEXT, 1)
    while part < total:
        while part >= word(ends, stage):
            earlier = word(ends, stage)
            stage += 1
        wait(shared, earlier)
        if word(shared, FAILED) == 0:
            task = word(table, 3 * part)
            if invoke(word(task, UNPACKS), task, word(table, 3 * part + 1), word(table, 3 * part + 2)):
                add(shared, FAILED, 1)
        add(shared, FINISHED, 1)
        part = add(shared, NEXT, 1)
    wait(shared, total)  # awake, so that the team's own end puts nobody to sleep


@dataclass(frozen=True, eq=False)
class Task:
    """A compiled function and its arguments, arrays and numbers.

    Without `rows` it is called once, by one thread. With `rows` it is also given a first and a last one, and threads
    share the rows; `nbytes` is the work's size.
    """

    function: Callable
    arguments: tuple
    rows: int | None = None
    nbytes: int = 0

    def __call__(self) -> None:
        """Run it by itself. Raises what the function raises."""
        if self.rows is None:
            self.function(*self.arguments)
        else:
            over_rows(self.function, self.rows, self.nbytes, *self.arguments)

    def bound(self) -> np.ndarray:
        """The task as threads read it; its function is compiled at the first need."""
        found, ranged = np.empty(words_of(self.arguments), np.int64), self.rows is not None
        kernel = machine_code(self.function, (*self.arguments, 0, 0) if ranged else self.arguments)
        (bind_ranged if ranged else bind_whole)(found.ctypes.data, kernel, *self.arguments)
        return found


@dataclass(frozen=True, eq=False)
class Product:
    """A matrix-vector product: one task, what prepares the vector, and what finishes the sums."""

    task: Task
    before: tuple[Task, ...] = ()
    after: tuple[Task, ...] = ()


def stages(products: Sequence[Product]) -> list[list[Task]]:
    """Products that threads take together: whatever prepares them, all products, whatever finishes them.

    A task that prepares several of them runs once.
    """
    before, after = (
        dict.fromkeys(task for product in products for task in getattr(product, name)) for name in ("before", "after")
    )
    return [*([task] for task in before), [product.task for product in products], *([task] for task in after)]


class Program:
    """Stages that follow each other. Threads share the tasks of a stage, by bytes.

    The arrays must keep their place; what they hold is read at each run. One thread runs it at a time.
    """

    def __init__(self, stages: Sequence[Sequence[Task]]):
        self.stages = [list(stage) for stage in stages if stage]
        self.tasks = [*itertools.chain.from_iterable(self.stages)]
        self._shared: np.ndarray | None = None

    def run(self) -> None:
        """Run all stages. Raises what a function raises; later stages are left out then."""
        if self._shared is None:
            if not all(isinstance(task.function, Dispatcher) for task in self.tasks):
                for task in self.tasks:
                    task()
                return
            self._bind()
        self._shared[: FINISHED + 1] = 0
        if _together(self._place, min(torch.get_num_threads(), self._worth // ROWS_WORTH_BYTES), self._shared):
            for task in self.tasks:  # it failed somewhere: have it raise here
                task()

    def _bind(self) -> None:
        found, tasks = [parts_of(stage) for stage in self.stages], {task: task.bound() for task in self.tasks}
        ends = np.array([0, *itertools.accumulate(map(len, found))])  # an empty stage comes first, so that there is one
        rows = [(tasks[task].ctypes.data, *rows) for parts in found for task, *rows in parts]
        table = np.array(rows, np.int64)
        self._shared = np.array([0, 0, 0, table.ctypes.data, ends.ctypes.data, len(ends)])
        self._place, self._kept = self._shared.ctypes.data, (table, ends, tasks)
        self._worth = max((sum(task.nbytes for task in stage) for stage in self.stages), default=0)


def over_rows(function: Callable, rows: int, nbytes: int, *arguments) -> None:
    """Call `function(*arguments, first, last)` over a partition of `range(rows)`; `nbytes` is the work's size.

    The arguments of a compiled function are arrays and numbers. Raises what the function raises.
    """
    threads = min(torch.get_num_threads(), rows, nbytes // ROWS_WORTH_BYTES)
    if threads > 1 and fork() and isinstance(function, Dispatcher):
        parts, kernel = min(rows, PARTS * threads), machine_code(function, (*arguments, 0, 0))
        shared = np.empty(STAGES + 2 + 3 * parts + words_of(arguments), np.int64)
        if not _together(lay_out(shared, kernel, rows, parts, *arguments), threads, shared):
            return
    function(*arguments, 0, rows)  # by one thread; after a failure it raises here


def _together(place: int, threads: int, shared: np.ndarray) -> int:
    """Do the shared work at this address with so many threads; whether something failed."""
    team = fork()
    if threads > 1 and team:
        team(_code_of_work(), place, threads, 0)
    else:
        work(place)
    return shared[FAILED]


def parts_of(stage: Sequence[Task]) -> list[tuple[Task, int, int]]:
    """Parts of about the same number of bytes: each task, with the first row and the last."""
    wanted, total = PARTS * torch.get_num_threads(), sum(task.nbytes for task in stage)
    found = []
    for task in stage:
        rows = task.rows or 0
        parts = max(1, min(rows, round(wanted * task.nbytes / max(1, total))))
        found += [(task, rows * part // parts, rows * (part + 1) // parts) for part in range(parts)]
    return found


_ADDRESSES: dict[tuple, int] = {}


def machine_code(function: Dispatcher, arguments: tuple) -> int:
    """Where the function's machine code for arguments of these types is; it is compiled at the first need."""
    # Numba's own look-up of types takes longer than a small product
    key = (function, *((a.dtype.num, a.ndim, a.flags.num) if type(a) is np.ndarray else type(a) for a in arguments))
    if key not in _ADDRESSES:
        found = _compiled(function, tuple(map(numba.typeof, arguments)))
        _ADDRESSES[key] = found.library.get_pointer_to_function(found.fndesc.llvm_func_name)
    return _ADDRESSES[key]


@cache
def _code_of_work() -> int:
    found = _compiled(work, (types.int64,))
    return found.library.get_pointer_to_function(found.fndesc.llvm_cfunc_wrapper_name)  # as C calls it


def _compiled(function: Dispatcher, kinds: tuple):
    function.compile(kinds)
    return function.overloads[kinds]


@cache
def fork() -> Callable | None:
    """`GOMP_parallel` of the OpenMP library that torch itself is linked with; None if there is none to use."""
    if os.getpid() != PROCESS:  # a forked child: the library would wait for threads of the parent for ever
        return None
    try:
        found = ctypes.CDLL(torch._C.__file__).GOMP_parallel
    except (AttributeError, OSError):
        return None
    found.argtypes, found.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint], None
    return found


# a forked child has none of its parent's threads, which torch's own products would wait for, too
for _forget in (fork.cache_clear, partial(torch.set_num_threads, 1)):
    os.register_at_fork(after_in_child=_forget)

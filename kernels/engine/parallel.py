"""Compiled functions of rows on the threads that torch uses: one by one, or many that follow each other.

torch and the kernels take turns, so they share one team of OpenMP threads. Two teams would compete for the cores, and a
thread that has just worked for torch is still awake for a kernel. Numba's threading layer would be a second team, and
it aborts when two Python threads enter it at once. One setting (`torch.set_num_threads`, `OMP_NUM_THREADS`) holds for
the whole process. `toolkit.kernels.engine.team` finds these threads; where there are none, one thread does all.

A call of a compiled function from Python looks up the types of its arguments and unpacks the arrays, which costs more
than a small product. So there are three nouns:

    Task      a compiled function with its arguments. Threads share the rows of a task that has rows.
    Product   a matrix-vector product: one task over rows, the tasks before it (they round or order the vector), and
              those after it (they finish the sums).
    Program   stages of tasks, bound once and then run by a single call, again and again.

        stage 1            stage 2                          stage 3                  stage 4
        round x       →    rows of Q  |  rows of K     →    rotate Q → rotate K  →   ...
        one thread         parts for all threads            one thread

Each thread takes the next part of a stage when it is done with one, so a slow core does not hold up the others. A part
begins when all parts of earlier stages have ended; tasks that run alone, one behind the other, are a single part. A
thread that waits asks its cache for the weights of its next part. Waking a thread that sleeps takes some 50
microseconds, as long as a small product. So waiting threads spin for about as long. After that they yield the core to
other processes until their turn comes. One call for many stages wakes the threads once.
"""

import itertools
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import callconv, cgutils
from numba.core.dispatcher import Dispatcher
from numba.extending import intrinsic

from toolkit.kernels.engine.compiled import compiled
from toolkit.kernels.engine.team import fork, num_threads

CACHE_LINE = 64  # bytes

# for less work, calling a second thread costs more than it saves
ROWS_WORTH_BYTES = 64 * 1024
PARTS = 4  # of the rows for each thread: one that another process holds up leaves the rest to the others
SPINS = 2000  # looks at what has finished, before a thread gives way
AHEAD_BYTES = 256 * 1024  # of its next part that a waiting thread asks its second cache for

I8, I32, I64 = map(ir.IntType, (8, 32, 64))
# what the threads of a team share, in words of 64 bits. `TABLE` is the address of the parts, [parts, PART_WORDS], and
# `ENDS` that of [stages]: where the parts of each stage end.
NEXT, FAILED, FINISHED, TABLE, ENDS, STAGES = range(6)
# a part: a bound task, its first row and its last, where the bytes of these rows begin and how many they are, and the
# number of the part that the same thread goes on with, or 0
TASK, FIRST, LAST, BEGIN, NBYTES, FOLLOWING, PART_WORDS = range(7)
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
def request(typing_context, address):
    """Ask the second cache for the line at this address."""

    def generate(context, builder, signature, values):
        place = builder.inttoptr(values[0], I8.as_pointer())
        kind = ir.FunctionType(ir.VoidType(), [place.type, I32, I32, I32])
        function = builder.module.declare_intrinsic("llvm.prefetch.p0", (), kind)
        builder.call(function, [place, I32(0), I32(2), I32(1)])  # to read, second cache, data
        return context.get_dummy_value()

    return types.void(types.int64), generate


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
    place, task = share_out(shared, rows, parts)
    _bind_ranged(task, kernel, arguments)
    return place


@compiled
def share_out(shared, rows, parts):
    """The same but for the task, which comes last; where all begins and where the task does. Compiled once for all."""
    place, table = shared.ctypes.data, STAGES + 2
    task = place + 8 * (table + PART_WORDS * parts)
    shared[: table + PART_WORDS * parts] = 0
    shared[TABLE], shared[ENDS], shared[STAGES] = place + 8 * table, place + 8 * (STAGES + 1), 1
    shared[STAGES + 1] = parts
    for part in range(parts):
        at = table + PART_WORDS * part
        shared[at + TASK], shared[at + FIRST], shared[at + LAST] = (
            task,
            rows * part // parts,
            rows * (part + 1) // parts,
        )
    return place, task


def words_of(arguments: Sequence[object]) -> int:
    """Words of 64 bits that a bound task takes, at most: arrays as Numba holds them, and numbers."""
    return ARGUMENTS + sum(5 + 2 * value.ndim if isinstance(value, np.ndarray) else 1 for value in arguments)


@numba.njit(inline="always")
def wait(shared, parts, begin, nbytes):
    """Return when so many parts have finished. Meanwhile the cache is asked for the bytes that come next."""
    looks, asked = 0, 0
    while word(shared, FINISHED) < parts:
        if asked < nbytes:
            request(begin + asked)
            asked += CACHE_LINE
            continue
        looks += 1
        if looks < SPINS:
            pause()
        else:
            sched_yield()


@numba.njit(inline="always")
def run(table, part):
    """Run a part, and those that follow it; whether one failed."""
    while True:
        place = PART_WORDS * part
        task = word(table, place + TASK)
        if invoke(word(task, UNPACKS), task, word(table, place + FIRST), word(table, place + LAST)):
            return True
        part = word(table, place + FOLLOWING)
        if part == 0:
            return False


@compiled(no_cfunc_wrapper=False)
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
        place = PART_WORDS * part
        wait(shared, earlier, word(table, place + BEGIN), word(table, place + NBYTES))
        if word(shared, FAILED) == 0 and run(table, part):
            add(shared, FAILED, 1)
        add(shared, FINISHED, 1)
        part = add(shared, NEXT, 1)
    wait(shared, total, 0, 0)  # awake, so that the team's own end puts nobody to sleep


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

    @property
    def alone(self) -> bool:
        """Whether one thread does it all: others would save less than they cost."""
        return self.rows is None or self.nbytes < ROWS_WORTH_BYTES

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


class Part(NamedTuple):
    """Some rows of a task; of one without rows, the whole task."""

    task: Task
    first: int
    last: int

    def weights(self) -> tuple[int, int]:
        """Where about the bytes of these rows begin, and how many of them to ask for ahead: of the largest array."""
        arrays = [array for array in self.task.arguments if isinstance(array, np.ndarray)]
        if self.task.alone or not self.task.rows or not arrays:
            return 0, 0
        largest = max(arrays, key=lambda array: array.nbytes)
        begin, end = (largest.nbytes * row // self.task.rows for row in (self.first, self.last))
        return largest.ctypes.data + begin, min(end - begin, AHEAD_BYTES)


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
        if _together(self._place, min(num_threads(), self._worth // ROWS_WORTH_BYTES), self._shared):
            for task in self.tasks:  # it failed somewhere: have it raise here
                task()

    def _bind(self) -> None:
        chains = [chains_of(stage) for stage in _joined(self.stages)]
        bound = {task: task.bound() for task in self.tasks}
        ends = np.array([0, *itertools.accumulate(map(len, chains))])  # an empty stage comes first, so there is one
        table = _table([*itertools.chain.from_iterable(chains)], bound)
        self._shared = np.array([0, 0, 0, table.ctypes.data, ends.ctypes.data, len(ends)])
        self._place, self._kept = self._shared.ctypes.data, (table, ends, bound)
        self._worth = max((sum(task.nbytes for task in stage) for stage in self.stages), default=0)


def over_rows(function: Callable, rows: int, nbytes: int, *arguments) -> None:
    """Call `function(*arguments, first, last)` over a partition of `range(rows)`; `nbytes` is the work's size.

    The arguments of a compiled function are arrays and numbers. Raises what the function raises.
    """
    threads = min(num_threads(), rows, nbytes // ROWS_WORTH_BYTES)
    if threads > 1 and fork() and isinstance(function, Dispatcher):
        parts, kernel = min(rows, PARTS * threads), machine_code(function, (*arguments, 0, 0))
        shared = np.empty(STAGES + 2 + PART_WORDS * parts + words_of(arguments), np.int64)
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


def _joined(stages: Sequence[Sequence[Task]]) -> list[list[Task]]:
    """The same stages, those in a row that one thread does made one."""
    found: list[list[Task]] = []
    for alone, neighbours in itertools.groupby(stages, key=_runs_alone):
        some = [*neighbours]
        found += [[*itertools.chain.from_iterable(some)]] if alone else some
    return found


def _runs_alone(stage: Sequence[Task]) -> bool:
    return len(stage) == 1 and stage[0].alone


def chains_of(stage: Sequence[Task]) -> list[list[Part]]:
    """The work of one turn: tasks that run alone, as one chain, or parts of about the same number of bytes."""
    if all(task.alone for task in stage):
        return [[Part(task, 0, task.rows or 0) for task in stage]]
    wanted, total = PARTS * num_threads(), sum(task.nbytes for task in stage)
    found = []
    for task in stage:
        rows = task.rows or 0
        parts = max(1, min(rows, round(wanted * task.nbytes / max(1, total))))
        found += [[Part(task, rows * part // parts, rows * (part + 1) // parts)] for part in range(parts)]
    return found


def _table(chains: Sequence[Sequence[Part]], bound: Mapping[Task, np.ndarray]) -> np.ndarray:
    """The parts as threads read them: the first one of each chain, then those that follow a first one."""
    rows: list[tuple[int, ...]] = []
    following: list[tuple[int, ...]] = []
    for chain in chains:
        places = [len(chains) + len(following) + number for number in range(len(chain) - 1)]
        each = [
            (bound[part.task].ctypes.data, part.first, part.last, *part.weights(), place)
            for part, place in zip(chain, (*places, 0), strict=True)
        ]
        rows.append(each[0])
        following += each[1:]
    return np.array([*rows, *following], np.int64)


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

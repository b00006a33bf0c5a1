"""Run a compiled row-range function on the threads that torch uses.

torch and the kernels take turns, so they share one team of OpenMP threads: two teams would fight for the cores, and a
thread that has just multiplied for one is still awake for the other. Where torch brings no such team, the functions run
on threads of a pool; the kernels release the GIL, so plain threads are enough. Numba's threading layer would abort when
two threads enter it at once. One setting (`torch.set_num_threads`, `OMP_NUM_THREADS`) holds for the whole process.
"""

import ctypes
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from itertools import pairwise

import numba
import numpy as np
import torch
from numba.core.dispatcher import Dispatcher

from toolkit.kernels.runtime.region import run_region

# for less work, calling a second thread costs more than it saves
ROWS_WORTH_BYTES = 64 * 1024
PROCESS = os.getpid()
PARTS = 4  # of the rows for each thread: one that another process holds up leaves the rest to the others


def over_rows(function: Callable, rows: int, nbytes: int, *arguments) -> None:
    """Call `function(*arguments, first, last)` over a partition of `range(rows)`; `nbytes` is the work's size.

    The arguments of a compiled function are arrays and numbers. Raises what the function raises.
    """
    threads = max(1, min(torch.get_num_threads(), rows, nbytes // ROWS_WORTH_BYTES))
    if threads == 1:
        function(*arguments, 0, rows)
    elif isinstance(function, Dispatcher) and (fork := fork_address()):
        parts = min(rows, PARTS * threads)
        if run_region(fork, threads, machine_code(function, (*arguments, 0, 0)), rows, parts, *arguments):
            function(*arguments, 0, rows)  # it failed somewhere: have it raise here
    else:
        _over_pool(function, rows, threads, arguments)


def _over_pool(function: Callable, rows: int, threads: int, arguments: tuple) -> None:
    edges = [rows * part // threads for part in range(threads + 1)]
    spans = list(pairwise(edges))
    others = [_pool().submit(function, *arguments, *span) for span in spans[1:]]
    function(*arguments, *spans[0])
    for other in others:
        other.result()


_ADDRESSES: dict[tuple, int] = {}


def machine_code(function: Dispatcher, arguments: tuple) -> int:
    """Where the function's machine code for arguments of these types is; it is compiled at the first need."""
    # Numba's own look-up of types takes longer than a small product
    key = (function, *((a.dtype.num, a.ndim, a.flags.num) if type(a) is np.ndarray else type(a) for a in arguments))
    if key not in _ADDRESSES:
        kinds = tuple(map(numba.typeof, arguments))
        function.compile(kinds)
        compiled = function.overloads[kinds]
        _ADDRESSES[key] = compiled.library.get_pointer_to_function(compiled.fndesc.llvm_func_name)
    return _ADDRESSES[key]


@cache
def fork_address() -> int | None:
    """Where `GOMP_parallel` of the OpenMP library is that torch itself is linked with; None if there is none to use."""
    if os.getpid() != PROCESS:  # a forked child: the library would wait for threads of the parent for ever
        return None
    try:
        return ctypes.cast(ctypes.CDLL(torch._C.__file__).GOMP_parallel, ctypes.c_void_p).value
    except (AttributeError, OSError):
        return None


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="kernels")


# a forked child has none of its parent's threads, which torch's own products would wait for, too
for _forget in (_pool.cache_clear, fork_address.cache_clear, partial(torch.set_num_threads, 1)):
    os.register_at_fork(after_in_child=_forget)

"""Run a compiled row-range function on as many threads as torch uses.

The kernels release the GIL, so plain threads are enough. Numba's threading layer would abort when two threads enter it
at once. One setting (`torch.set_num_threads`, `OMP_NUM_THREADS`) holds for the whole process.
"""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise

import torch

COMPILE = {"nogil": True, "error_model": "numpy"}  # how Numba compiles functions of rows
# for less work, waking a second thread costs more than it saves
ROWS_WORTH_BYTES = 256 * 1024


def over_rows(function: Callable, rows: int, nbytes: int, *arguments) -> None:
    """Call `function(*arguments, first, last)` over a partition of `range(rows)`; `nbytes` is the work's size."""
    threads = max(1, min(torch.get_num_threads(), rows, nbytes // ROWS_WORTH_BYTES))
    edges = [rows * part // threads for part in range(threads + 1)]
    spans = list(pairwise(edges))
    others = [_pool().submit(function, *arguments, *span) for span in spans[1:]]
    function(*arguments, *spans[0])
    for other in others:
        other.result()


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="kernels")


# a forked child has none of its parent's threads
os.register_at_fork(after_in_child=_pool.cache_clear)

"""Compiled functions that run one after the other, again and again, with the same arguments.

Calling a kernel from Python costs more than a small product: the types of its arguments are looked up, arrays are
unpacked and results allocated, each time. A `Program` does that once. Then a single call runs all of it:

    product = Product(Task(kernel, (weight, x, y), rows, weight.nbytes))
    program = Program(stages([product, another]))
    x[:] = ...
    program.run()     # y holds the product
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numba.core.dispatcher import Dispatcher

from toolkit.kernels.runtime import threads
from toolkit.kernels.runtime.region import TASK_WORDS, bind, bind_whole, run_stages


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
            threads.over_rows(self.function, self.rows, self.nbytes, *self.arguments)


@dataclass(frozen=True, eq=False)
class Product:
    """A matrix-vector product: one task, what prepares the vector, and what finishes the sums."""

    task: Task
    before: tuple[Task, ...] = ()
    after: tuple[Task, ...] = ()


def stages(products: Sequence[Product]) -> list[list[Task]]:
    """Products that threads take together: whatever prepares them, all products, whatever finishes them."""
    before, after = ([task for product in products for task in getattr(product, name)] for name in ("before", "after"))
    return [*([task] for task in before), [product.task for product in products], *([task] for task in after)]


class Program:
    """Stages that follow each other. Threads share the tasks of a stage, by bytes.

    The arrays must keep their place; what they hold is read at each run. One thread runs it at a time.
    """

    def __init__(self, stages: Sequence[Sequence[Task]]):
        self.stages = [list(stage) for stage in stages if stage]
        self._bound = None

    def run(self) -> None:
        """Run all stages. Raises what a function raises; what follows is left out then."""
        fork = threads.fork_address()
        if fork is None or not self._compiled():
            return self._one_by_one()
        self._bound = self._bound or _Bound(self.stages)
        if run_stages(fork, torch.get_num_threads(), *self._bound.place):
            self._one_by_one()  # it failed somewhere: have it raise here
        return None

    def _compiled(self) -> bool:
        return self._bound is not None or all(isinstance(task.function, Dispatcher) for task in _tasks(self.stages))

    def _one_by_one(self) -> None:
        for task in _tasks(self.stages):
            task()


class _Bound:
    """The tables of `run_stages`, and their `place`: the addresses that it takes, and the number of stages."""

    def __init__(self, stages: list[list[Task]]):
        found = [_parts(stage) for stage in stages]
        ends = itertools.accumulate(map(len, found))
        worth = (sum(task.nbytes for task in stage) // threads.ROWS_WORTH_BYTES for stage in stages)
        self._memory = {task: _memory(task) for task in _tasks(stages)}
        rows = [(self._memory[task].ctypes.data, *ends) for parts in found for task, *ends in parts]
        self._table, self._ends = np.array(rows, np.int64), np.array([*zip(ends, worth, strict=True)], np.int64)
        self.place = self._table.ctypes.data, self._ends.ctypes.data, len(stages)


def _tasks(stages: list[list[Task]]) -> list[Task]:
    return [*itertools.chain.from_iterable(stages)]


def _parts(stage: list[Task]) -> list[tuple[Task, int, int]]:
    """Parts of about the same number of bytes: each task, with the first row and the last."""
    wanted, total = threads.PARTS * torch.get_num_threads(), sum(task.nbytes for task in stage)
    found = []
    for task in stage:
        rows = task.rows or 0
        parts = max(1, min(rows, round(wanted * task.nbytes / max(1, total))))
        found += [(task, rows * part // parts, rows * (part + 1) // parts) for part in range(parts)]
    return found


def _memory(task: Task) -> np.ndarray:
    """The task as `run_stages` reads it. Its function is compiled at the first need."""
    arguments = task.arguments
    words = (5 + 2 * value.ndim if isinstance(value, np.ndarray) else 1 for value in arguments)
    memory = np.zeros(TASK_WORDS + sum(words), np.int64)
    ranged = task.rows is not None
    kernel = threads.machine_code(task.function, (*arguments, 0, 0) if ranged else arguments)
    (bind if ranged else bind_whole)(memory.ctypes.data, kernel, *arguments)
    return memory

"""Which way of doing an operation is fastest on this machine: measured at first need, and kept.

A choice depends on the CPU and its features, the number of threads, the versions of Numba and torch, and the kernels'
code. Nothing is measured at import.
"""

import logging
import os
import platform
import time
from collections.abc import Callable, Mapping
from functools import cache
from importlib.metadata import version
from pathlib import Path

import torch
from llvmlite import binding

from toolkit import sources
from toolkit.cache import cached
from toolkit.errors import UserError
from toolkit.files import read_json, write_json

REPETITIONS = 7
SECONDS = "seconds.json"
WORTH_CHANGING = 0.95  # of the first one's time: a way that is hardly faster does not replace it

log = logging.getLogger(__name__)

Runs = Mapping[str, Callable[[], object]]


def fastest(operation: str, names: tuple[str, ...], prepare: Callable[[], Runs], threads: int, module: str) -> str:
    """The name of the fastest way; the first name wins ties.

    Args:
        operation: what is done, such as `"endor prompt bfloat16 int8 4"`.
        names: the ways to choose from, the one to prefer first.
        prepare: makes a run of each name; called only if nothing fitting is kept.
        threads: how many the runs use.
        module: the choice is made again when its code changes.

    A cache that cannot be written, or code that cannot be read, gives the first name, with a warning.
    """
    key = {"operation": operation, "names": names, "threads": threads, "machine": machine()}
    try:
        code = sources.dependencies(module)
        folder = cached("fastest", key, code, lambda made: write_json(made / SECONDS, measure(prepare())))
        seconds = read_json(folder / SECONDS)
    except (OSError, UserError) as error:
        log.warning("%s: %s, unmeasured, since no choice can be kept: %s", operation, names[0], error)
        return names[0]
    best = choose(names, seconds)
    log.info("%s: %s (%s)", operation, best, ", ".join(f"{name} {seconds[name] * 1e3:.2f} ms" for name in names))
    return best


def choose(names: tuple[str, ...], seconds: Mapping[str, float]) -> str:
    """The name with the least time, or the first one if that takes hardly longer."""
    best = min(names, key=seconds.__getitem__)
    return best if seconds[best] < WORTH_CHANGING * seconds[names[0]] else names[0]


def measure(runs: Runs, clock: Callable[[], float] = time.perf_counter) -> dict[str, float]:
    """The least seconds of several runs of each; they take turns, so that a disturbance meets all of them."""
    seconds = {name: float("inf") for name in runs}
    for run in runs.values():
        run()  # compile, touch memory
    for _ in range(REPETITIONS):
        for name, run in runs.items():
            start = clock()
            run()
            seconds[name] = min(seconds[name], clock() - start)
    return seconds


@cache
def machine() -> tuple[str, ...]:
    """The key of a machine, since another may choose otherwise: CPU, its features, cores, versions."""
    features = binding.get_host_cpu_features().flatten()
    return _cpu(), features, str(os.cpu_count()), torch.__version__, version("numba"), version("llvmlite")


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, f"{platform.processor()} {binding.get_host_cpu_name()}")

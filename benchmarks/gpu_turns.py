"""Contestants on this machine's GPU, in turns: how they are timed, set beside each other and judged.

Before each run, reading two gigabytes flushes the L2 cache and keeps the GPU busy while the host launches what is
timed, so that the events around it see no gap. Medians are compared.
"""

import argparse
import importlib.metadata
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

import reports
import torch

from toolkit.machines.probe import describe

DEVICE = "cuda"
COPY = "device copy"
FLUSH_BYTES = 2 << 30
WARM_UP = 3


@dataclass(frozen=True)
class Contestant:
    """One way to do an operation; `nbytes` it must at least read and write."""

    operation: str
    name: str
    nbytes: int
    run: Callable[[], torch.Tensor]


@dataclass(frozen=True)
class Row:
    """One measured contestant; `host_s` is what launching took, hidden behind the flush if less than `flush_s`."""

    shape: str
    operation: str
    name: str
    median_s: float
    minimum_s: float
    host_s: float
    nbytes: int
    gb_s: float
    share_of_copy: float  # of the bandwidth of a copy on the device


@dataclass(frozen=True)
class Goal:
    """What our kernel is measured against: by bandwidth, or by time."""

    ours: str
    operation: str
    rival: str
    by: str
    at_least: float


def compare(
    name: str,
    make: Callable[[int, int], list[Contestant]],
    goals: Sequence[Goal],
    settings: Mapping[str, object],
    options: argparse.Namespace,
) -> int:
    """Measure what `make` gives for each shape; print and save it. 0 if all goals are met, 1 if not, 77 without a GPU.

    Among the contestants is a copy on the device, named `COPY`, whose bandwidth stands for the GPU's.
    """
    if not torch.cuda.is_available():
        print("skipped: no CUDA device")
        return 77
    flush = torch.ones(FLUSH_BYTES // 4, device=DEVICE)
    rows, judged = [], []
    for shape in options.shapes:
        found = _measure(shape, make(*map(int, shape.split("x"))), options.repetitions, flush)
        rows += found
        judged += _judge(shape, found, goals)
    report = {
        "machine": describe() | _gpu(),
        "settings": vars(options) | settings,
        "flush_s": statistics.median(_times(flush.sum, torch.zeros(1, device=DEVICE), options.repetitions)[0]),
        "rows": [asdict(row) for row in rows],
        "goals": judged,
    }
    print(_tables(report, settings))
    reports.save(name, report)
    return int(not all(goal["met"] for goal in judged))


def _measure(shape: str, field: list[Contestant], repetitions: int, flush: torch.Tensor) -> list[Row]:
    """All contestants on one matrix, taking turns."""
    for contestant in field:
        for _ in range(WARM_UP):
            contestant.run()
    spent = {id(contestant): ([], []) for contestant in field}
    for _ in range(repetitions):
        for contestant in field:
            for kept, new in zip(spent[id(contestant)], _times(contestant.run, flush, 1), strict=True):
                kept += new
    copy = next(contestant for contestant in field if contestant.name == COPY)
    copy_gb_s = copy.nbytes / statistics.median(spent[id(copy)][0]) / 1e9
    return [_row(shape, contestant, *spent[id(contestant)], copy_gb_s) for contestant in field]


def _times(run: Callable[[], torch.Tensor], flush: torch.Tensor, repetitions: int) -> tuple[list[float], list[float]]:
    """Seconds on the device, and seconds that the host took to launch, of every repetition."""
    device_s, host_s = [], []
    for _ in range(repetitions):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        flush.sum()
        start = time.perf_counter()
        begin.record()
        run()
        end.record()
        host_s.append(time.perf_counter() - start)
        torch.cuda.synchronize()
        device_s.append(begin.elapsed_time(end) / 1e3)
    return device_s, host_s


def _row(shape: str, contestant: Contestant, device_s: list[float], host_s: list[float], copy_gb_s: float) -> Row:
    median_s = statistics.median(device_s)
    gb_s = contestant.nbytes / median_s / 1e9
    names = (shape, contestant.operation, contestant.name)
    times = (median_s, min(device_s), statistics.median(host_s))
    return Row(*names, *times, contestant.nbytes, gb_s, gb_s / copy_gb_s)


def _judge(shape: str, rows: list[Row], goals: Sequence[Goal]) -> list[dict]:
    by_name = {(row.operation, row.name): row for row in rows}
    found = []
    for goal in goals:
        ours, rival = by_name[goal.operation, goal.ours], by_name[goal.operation, goal.rival]
        ratio = ours.gb_s / rival.gb_s if goal.by == "bandwidth" else rival.median_s / ours.median_s
        ceiling = 1.0 if goal.by == "bandwidth" else rival.nbytes / ours.nbytes
        found.append({"shape": shape} | asdict(goal) | {"ratio": ratio, "ceiling": ceiling})
        found[-1]["met"] = ratio >= goal.at_least
    return found


def _gpu() -> dict:
    properties = torch.cuda.get_device_properties(DEVICE)
    return {
        "compute_capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "l2_bytes": properties.L2_cache_size,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "numba": importlib.metadata.version("numba"),
        "numba_cuda": importlib.metadata.version("numba-cuda"),
        "measured_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def _tables(report: dict, told: Mapping[str, object]) -> str:
    machine, settings = report["machine"], report["settings"]
    lines = [
        f"{', '.join(f'{name} {value}' for name, value in told.items())}; {machine['gpu']}, torch {machine['torch']}, "
        f"numba-cuda {machine['numba_cuda']}; "
        f"medians of {settings['repetitions']} runs, L2 flushed (a flush takes {report['flush_s'] * 1e6:.0f} µs).",
        "",
        "| shape | operation | contestant | median µs | minimum µs | launch µs | MB moved | GB/s | of copy |",
        "| --- | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in report["rows"]:
        times = " | ".join(f"{row[key] * 1e6:.1f}" for key in ("median_s", "minimum_s", "host_s"))
        lines.append(
            f"| {row['shape']} | {row['operation']} | {row['name']} | {times} | {row['nbytes'] / 1e6:.1f} "
            f"| {row['gb_s']:.0f} | {row['share_of_copy']:.0%} |"
        )
    lines += ["", "| shape | goal | ratio | wanted | ceiling | |", "| --- | --- | ---: | ---: | ---: | --- |"]
    for goal in report["goals"]:
        lines.append(
            f"| {goal['shape']} | {goal['operation']}: {goal['by']} against {goal['rival']} | {goal['ratio']:.2f} "
            f"| ≥ {goal['at_least']:g} | {goal['ceiling']:.2f} | {'met' if goal['met'] else '**missed**'} |"
        )
    return "\n".join(lines) + "\n"


def _shape(text: str) -> str:
    sizes = text.split("x")
    if len(sizes) != 2 or not all(size.isdecimal() and int(size) > 0 for size in sizes):
        raise argparse.ArgumentTypeError(f"{text!r} is no shape; expected rows x columns, like 9216x36864")
    return text


def options(description: str, shapes: list[str]) -> argparse.Namespace:
    """The options of a benchmark on a GPU: `--shapes` and `--repetitions`."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", type=_shape, default=shapes, help="rows x columns")
    parser.add_argument("--repetitions", type=int, default=50)
    found = parser.parse_args()
    if found.repetitions < 1:
        parser.error("--repetitions must be at least 1")
    return found

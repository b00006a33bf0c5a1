"""The CUDA bitmap kernels beside their rivals on this machine's GPU: times, shares of the limit, ratios, goals.

    python benchmarks/bitmap_cuda.py [--repetitions 50] [--shapes 9216x9216 9216x36864 8192x28672]

fp16 at 50 % sparsity. Every contestant's result is checked first. Then they take turns; before each run, reading two
gigabytes flushes the L2 cache and keeps the GPU busy while the host launches what is timed, so that the events around
it see no gap. Medians are compared. Writes results/benchmarks/bitmap_cuda.json.
"""

import argparse
import importlib.metadata
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass

import reports
import torch

from toolkit.formats import encode
from toolkit.kernels import bitmap
from toolkit.machines.probe import describe

DEVICE = "cuda"
SHAPES = ["9216x9216", "9216x36864", "8192x28672"]
BATCHES = [1, 2, 4, 8, 16]
SPARSITY = 0.5
FLUSH_BYTES = 2 << 30
WARM_UP = 3
OURS, COPY, CUBLAS, CUSPARSE = "bitmap", "device copy", "cuBLAS fp16", "cuSPARSE CSR fp16"


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

    operation: str
    rival: str
    by: str
    at_least: float


GOALS = [
    Goal("decompress", COPY, "bandwidth", 0.7),
    Goal("matvec, batch 1", CUBLAS, "time", 1.3),
    Goal("matvec, batch 1", CUSPARSE, "time", 3),
]


def main() -> int:
    """Measure; 0 if all goals are met, 1 if not, 77 without a GPU."""
    options = _options()
    if not torch.cuda.is_available():
        print("skipped: no CUDA device")
        return 77
    flush = torch.ones(FLUSH_BYTES // 4, device=DEVICE)
    rows, goals = [], []
    for shape in options.shapes:
        found = _measure(shape, options.repetitions, flush)
        rows += found
        goals += _judge(shape, found)
    report = {
        "machine": describe() | _gpu(),
        "settings": vars(options) | {"sparsity": SPARSITY, "dtype": "float16"},
        "flush_s": statistics.median(_times(flush.sum, torch.zeros(1, device=DEVICE), options.repetitions)[0]),
        "rows": [asdict(row) for row in rows],
        "goals": goals,
    }
    print(_tables(report))
    reports.save("bitmap_cuda", report)
    return int(not all(goal["met"] for goal in goals))


def _measure(shape: str, repetitions: int, flush: torch.Tensor) -> list[Row]:
    """All contestants on one matrix, taking turns."""
    field = _contestants(*map(int, shape.split("x")))
    for contestant in field:
        for _ in range(WARM_UP):
            contestant.run()
    spent = {id(contestant): ([], []) for contestant in field}
    for _ in range(repetitions):
        for contestant in field:
            for kept, new in zip(spent[id(contestant)], _times(contestant.run, flush, 1), strict=True):
                kept += new
    median_s = {c.name: statistics.median(spent[id(c)][0]) for c in field if c.operation == "decompress"}
    copy_gb_s = next(c.nbytes for c in field if c.name == COPY) / median_s[COPY] / 1e9
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


def _contestants(rows: int, columns: int) -> list[Contestant]:
    """Each with its inputs on the device, its output allocated, and its result checked.

    What the rivals multiply with is made of the same weights, so all need 5 GB of the device for the largest shape.
    """
    generator = torch.Generator(DEVICE).manual_seed(0)
    weight = torch.randn(rows, columns, generator=generator, device=DEVICE, dtype=torch.float16)
    weight.masked_fill_(torch.rand(rows, columns, generator=generator, device=DEVICE) < SPARSITY, 0)
    packed, out = encode("endor", weight).to(DEVICE), torch.full_like(weight, 3)
    field = [
        Contestant("decompress", OURS, packed.nbytes + out.nbytes, lambda: bitmap.decompress(packed, out)),
        Contestant("decompress", COPY, 2 * out.nbytes, lambda: out.copy_(weight)),
    ]
    if not torch.equal(field[0].run().view(torch.int16), weight.view(torch.int16)):
        raise SystemExit(f"decompress of {rows}x{columns}: wrong result")
    sparse = _csr(weight)
    for batch in BATCHES:
        x = torch.randn(batch, columns, generator=generator, device=DEVICE).half()
        field += _products(weight, packed, sparse, x)
    return field


def _products(weight: torch.Tensor, packed, sparse: torch.Tensor, x: torch.Tensor) -> list[Contestant]:
    operation, batch = f"matvec, batch {len(x)}", len(x)
    y = torch.empty(batch, len(weight), device=DEVICE)
    half = torch.empty(batch, len(weight), device=DEVICE, dtype=torch.float16)
    traffic = x.nbytes + half.nbytes
    field = [
        Contestant(operation, OURS, packed.nbytes + x.nbytes + y.nbytes, lambda: bitmap.matvec(packed, x, y)),
        Contestant(operation, CUBLAS, weight.nbytes + traffic, lambda: torch.mm(x, weight.T, out=half)),
    ]
    if batch == 1:  # a matrix-vector product, as cuBLAS and cuSPARSE have them
        field[1] = Contestant(operation, CUBLAS, weight.nbytes + traffic, lambda: torch.mv(weight, x[0], out=half[0]))
        nbytes = sparse.values().nbytes + sparse.col_indices().nbytes + sparse.crow_indices().nbytes
        field.append(Contestant(operation, CUSPARSE, nbytes + traffic, lambda: sparse @ x[0]))
    expected, magnitude = weight.float() @ x.float().T, weight.float().abs() @ x.float().abs().T
    for contestant in field:
        tolerance = 1e-5 if contestant.name == OURS else 1e-2  # theirs round their results to fp16
        if not ((contestant.run().view(batch, -1).T - expected).abs() <= tolerance * magnitude).all():
            raise SystemExit(f"{operation} of {list(weight.shape)}: wrong result of {contestant.name}")
    return field


def _csr(weight: torch.Tensor) -> torch.Tensor:
    """With 32-bit indices, which cuSPARSE reads faster than torch's own 64-bit ones."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse")  # it is in beta
        found = weight.to_sparse_csr()
        indices = found.crow_indices().int(), found.col_indices().int()
        return torch.sparse_csr_tensor(*indices, found.values(), found.shape)


def _judge(shape: str, rows: list[Row]) -> list[dict]:
    by_name = {(row.operation, row.name): row for row in rows}
    found = []
    for goal in GOALS:
        ours, rival = by_name[goal.operation, OURS], by_name[goal.operation, goal.rival]
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


def _tables(report: dict) -> str:
    machine, settings = report["machine"], report["settings"]
    lines = [
        f"fp16, sparsity {SPARSITY:g}; {machine['gpu']}, torch {machine['torch']}, numba-cuda {machine['numba_cuda']}; "
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


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", type=_shape, default=SHAPES, help="rows x columns")
    parser.add_argument("--repetitions", type=int, default=50)
    options = parser.parse_args()
    if options.repetitions < 1:
        parser.error("--repetitions must be at least 1")
    return options


if __name__ == "__main__":
    sys.exit(main())

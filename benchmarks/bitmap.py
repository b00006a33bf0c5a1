"""The bitmap kernels beside their rivals, in one run: times, shares of the byte limit, ratios, goals.

    python benchmarks/bitmap.py --rows 9216 --columns 9216 --sparsity 0.5

Contestants take turns, so that a disturbance of the machine meets all of them; minima are compared.
"""

import argparse
import json
import os
import platform
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import toolkit  # noqa: F401 - before torch, so that threads which wait sleep  # isort: skip
import numba
import numpy as np
import torch
from llvmlite import binding

from toolkit import paths
from toolkit.files import make_folder, replacing
from toolkit.formats import encode
from toolkit.kernels import bitmap
from toolkit.kernels.engine.parallel import over_rows

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
BEGIN, END = "<!-- begin generated: python benchmarks/bitmap.py --markdown -->", "<!-- end generated -->"
ALL_BYTES = "as many bytes as the dense matrix"
IN_CACHE_ROWS = 16
PAUSE_S = 0.002  # OpenMP's threads spin for a while after their work, and would take a core from the next contestant
SPREAD = 0.03  # by which minima of two runs differ


@dataclass(frozen=True)
class Contestant:
    """One way to do an operation; `nbytes` it must at least read and write."""

    operation: str
    name: str
    nbytes: int
    run: Callable[[], object]
    seldom: bool = False  # so slow that a few repetitions will do


@dataclass(frozen=True)
class Row:
    """One measured contestant."""

    operation: str
    name: str
    minimum_s: float
    median_s: float
    repetitions: int
    nbytes: int
    gb_s: float
    share_of_limit: float  # of the measured bandwidth


@dataclass(frozen=True)
class Goal:
    """`rival`'s time over `ours`, and what it should be at least."""

    operation: str
    ours: str
    rival: str
    at_least: float


# a decompression at most 1.1 times as long as a copy is a ratio of 1 / 1.1
GOALS = [
    Goal("decompress", "auto", "dense copy", 1 / 1.1),
    Goal("decompress", "auto", "zstd", 30),
    Goal("decompress", "auto", "NumPy boolean indexing", 30),
    Goal("decompress", "portable", "NumPy boolean indexing", 3),
    Goal("matvec", "auto", "torch dense", 1.5),
    Goal("matvec", "auto", "torch CSR", 10),
]


def contestants(weight: torch.Tensor, x: torch.Tensor) -> list[Contestant]:
    """All that take part, each with its inputs ready and its output allocated and touched."""
    packed, out = encode("endor", weight), weight.clone()
    decoding = packed.nbytes + out.nbytes
    backends = [*bitmap.BACKENDS.available(), "auto"]
    found = [
        Contestant("decompress", name, decoding, lambda name=name: bitmap.decompress(packed, out, name))
        for name in backends
    ]
    x32, y = x.float(), torch.zeros(len(weight))
    found += [
        Contestant("matvec", name, packed.nbytes, lambda name=name: bitmap.matvec(packed, x32, y, name))
        for name in backends
    ]
    return found + _parts(packed, out) + _decoding_rivals(weight, packed, out) + _matvec_rivals(weight, x)


def _parts(packed: bitmap.Bitmap, out: torch.Tensor) -> list[Contestant]:
    """Explanations of the first backend's times: its memory traffic alone, and its work without `vmovnt` stores."""
    fastest, rows = bitmap.BACKENDS[bitmap.BACKENDS.available()[0]], len(out)
    arrays, dense = packed.arrays, bitmap._bits(out)
    values = packed.values[: packed.values.numel() // 8 * 8].view(torch.int64)
    data = torch.ones(out.nbytes // 8, dtype=torch.int64)
    return [
        Contestant("read", ALL_BYTES, data.nbytes, data.sum),
        Contestant("read", "the packed values", values.nbytes, values.sum),
        Contestant(
            "decompress",
            f"{bitmap.BACKENDS.available()[0]}, through the caches",
            packed.nbytes + out.nbytes,
            lambda: over_rows(fastest.decompress(False), rows, out.nbytes, *arrays, dense),
        ),
    ]


def in_cache_ns(weight: torch.Tensor, x: torch.Tensor) -> dict[str, float]:
    """Nanoseconds that one thread of the first backend takes for a word of 32 elements that the caches hold."""
    fastest = bitmap.BACKENDS[bitmap.BACKENDS.available()[0]]
    packed = encode("endor", weight[:IN_CACHE_ROWS])
    rows, words = packed.shape[0], packed.bitmap.numel() // 4
    arrays = packed.arrays
    dense, y, x = bitmap._bits(torch.zeros_like(weight[:rows])), np.zeros(rows, np.float32), x.float().numpy()
    runs = {
        "decompress": lambda: fastest.decompress(False)(*arrays, dense, 0, rows),
        "matvec": lambda: fastest.product(weight.dtype)(*arrays, x, y, 0, rows),
    }
    field = [Contestant("in cache", name, 0, run) for name, run in runs.items()]
    return {name: min(spent) / words * 1e9 for (_, name), spent in measure(field, 100).items()}


def _decoding_rivals(weight: torch.Tensor, packed, out: torch.Tensor) -> list[Contestant]:
    import zstandard

    zstd = encode("zstd", weight)
    frame = zstandard.ZstdCompressor(level=3).compress(memoryview(weight.view(torch.uint8).numpy().reshape(-1)))
    decoding = packed.nbytes + out.nbytes
    mask, values = (weight != 0).numpy(), bitmap._bits(packed.values)
    dense = bitmap._bits(out)

    def boolean_indexing():
        dense[...] = 0
        dense[mask] = values

    def one_call():
        zstandard.ZstdDecompressor().decompress(frame)

    def all_cores():
        zstd.unpack_into(out)

    return [
        Contestant("decompress", "dense copy", 2 * out.nbytes, lambda: out.copy_(weight)),
        Contestant("decompress", "zstd", len(frame) + out.nbytes, one_call, seldom=True),
        Contestant("decompress", "zstd, all cores", zstd.nbytes + out.nbytes, all_cores, seldom=True),
        Contestant("decompress", "NumPy boolean indexing", decoding, boolean_indexing, seldom=True),
    ]


def _matvec_rivals(weight: torch.Tensor, x: torch.Tensor) -> list[Contestant]:
    # in fp32: torch multiplies no 16-bit CSR on the CPU
    csr, lean, x32 = _csr(weight.float(), torch.int64), _csr(weight.float(), torch.int32), x.float()
    return [
        Contestant("matvec", "torch dense", weight.nbytes, lambda: weight @ x),
        Contestant("matvec", "torch CSR", _csr_nbytes(csr), lambda: csr @ x32, seldom=True),
        Contestant("matvec", "torch CSR, int32 indices", _csr_nbytes(lean), lambda: lean @ x32),
    ]


def _csr(weight: torch.Tensor, index_dtype: torch.dtype) -> torch.Tensor:
    """As `to_sparse_csr()` makes it if the indices are int64; with int32, torch hands them to MKL as they are."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse")  # it is in beta, and checks nothing
        csr = weight.to_sparse_csr()
        indices = csr.crow_indices().to(index_dtype), csr.col_indices().to(index_dtype)
        return torch.sparse_csr_tensor(*indices, csr.values(), csr.shape)


def _csr_nbytes(csr: torch.Tensor) -> int:
    return csr.crow_indices().nbytes + csr.col_indices().nbytes + csr.values().nbytes


def measure(field: list[Contestant], repetitions: int) -> dict[tuple[str, str], list[float]]:
    """Seconds of every repetition; all take turns."""
    times = {(c.operation, c.name): [] for c in field}
    for contestant in field:
        contestant.run()
    for repetition in range(repetitions):
        for contestant in field:
            if contestant.seldom and repetition % 5:
                continue
            time.sleep(PAUSE_S)
            start = time.perf_counter()
            contestant.run()
            times[contestant.operation, contestant.name].append(time.perf_counter() - start)
    return times


def run(options: argparse.Namespace) -> dict:
    """Measure; the result is what the JSON file holds."""
    generator = torch.Generator().manual_seed(0)
    shape = (options.rows, options.columns)
    weight = torch.randn(shape, generator=generator).to(DTYPES[options.dtype])
    weight.masked_fill_(torch.rand(shape, generator=generator) < options.sparsity, 0)
    x = torch.randn(options.columns, generator=generator).to(weight.dtype)
    field = contestants(weight, x)
    times = measure(field, options.repetitions)
    best = {key: min(spent) for key, spent in times.items()}
    limit = next(c.nbytes / best[c.operation, c.name] / 1e9 for c in field if c.name == ALL_BYTES)
    rows = [_row(c, times[c.operation, c.name], limit) for c in field]
    goals = [
        asdict(goal) | {"ratio": best[goal.operation, goal.rival] / best[goal.operation, goal.ours]}
        for goal in GOALS
        if (goal.operation, goal.ours) in best
    ]
    for goal in goals:
        goal["met"] = goal["ratio"] >= goal["at_least"]
    return {
        "machine": _machine(),
        "parameters": {"shape": shape, "dtype": options.dtype, "sparsity": options.sparsity},
        "auto": bitmap.BACKENDS.available()[0],
        "read_bandwidth_gb_s": limit,
        "in_cache_ns_per_word": in_cache_ns(weight, x),
        "rows": [asdict(row) for row in rows],
        "goals": goals,
    }


def _row(contestant: Contestant, spent: list[float], limit_gb_s: float) -> Row:
    gb_s = contestant.nbytes / min(spent) / 1e9
    times = (min(spent), float(np.median(spent)), len(spent))
    return Row(contestant.operation, contestant.name, *times, contestant.nbytes, gb_s, gb_s / limit_gb_s)


def _machine() -> dict:
    cpus = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return {
        "cpu": cpus[0].partition(":")[2].strip() if cpus else platform.processor(),
        "llvm_cpu": binding.get_host_cpu_name(),
        "threads": torch.get_num_threads(),
        "cpus": os.cpu_count(),
        "load_average": os.getloadavg()[0],
        "torch": torch.__version__,
        "numba": numba.__version__,
        "measured_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def markdown(result: dict) -> str:
    """Tables for people."""
    machine, parameters = result["machine"], result["parameters"]
    rows, columns = parameters["shape"]
    lines = [
        f"{rows} × {columns} {parameters['dtype']}, sparsity {parameters['sparsity']:g}; {machine['cpu']} "
        f"({machine['llvm_cpu']}), {machine['threads']} threads, "
        f"load average {machine['load_average']:.1f}; torch {machine['torch']}, numba {machine['numba']}; "
        f"{machine['measured_at']}. Reads reach {result['read_bandwidth_gb_s']:.1f} GB/s. "
        f"`auto` takes {result['auto']}.",
        "",
        "| operation | contestant | minimum ms | median ms | MB moved | GB/s | of read bandwidth |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in result["rows"]:
        lines.append(
            f"| {row['operation']} | {row['name']} | {row['minimum_s'] * 1e3:.2f} | {row['median_s'] * 1e3:.2f} "
            f"| {row['nbytes'] / 1e6:.1f} | {row['gb_s']:.1f} | {_share(row['share_of_limit'])} |"
        )
    lines += ["", "| goal | ratio of times | wanted | |", "| --- | ---: | ---: | --- |"]
    for goal in result["goals"]:
        verdict = "met" if goal["met"] else "**missed**"
        lines.append(
            f"| {goal['operation']}: {goal['ours']} against {goal['rival']} | {goal['ratio']:.2f} "
            f"| ≥ {goal['at_least']:.2f} | {verdict} |"
        )
    words = rows * -(-columns // bitmap.WORD)
    for operation, ns in result["in_cache_ns_per_word"].items():
        alone_ms = ns * words / machine["threads"] / 1e6
        lines.append(
            f"\nOut of the caches, {operation} takes {ns:.2f} ns a word: {alone_ms:.2f} ms in all on these threads."
        )
    return "\n".join(lines) + "\n"


def _share(of_limit: float) -> str:
    """A share of the read bandwidth. One above it, by more than two runs differ, is called a fault."""
    fault = f" **fault:** above the {ALL_BYTES!r} read in the same run" if of_limit > 1 + SPREAD else ""
    return f"{of_limit:.0%}{fault}"


def main() -> None:
    """Measure, print and save; with `--from-json`, only print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=9216)
    parser.add_argument("--columns", type=int, default=9216)
    parser.add_argument("--sparsity", type=float, default=0.5)
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--repetitions", type=int, default=25)
    parser.add_argument("--json", type=Path, default=paths.results_dir() / "benchmarks" / "bitmap.json")
    parser.add_argument("--markdown", type=Path, help="put the tables between the markers in this file, too")
    parser.add_argument("--from-json", type=Path, help="measure nothing; show what an earlier run wrote")
    options = parser.parse_args()
    if not 0 <= options.sparsity < 1 or min(options.rows, options.columns, options.repetitions) < 1:
        parser.error("sparsity must lie in [0, 1), sizes and repetitions must be at least 1")
    result = json.loads(options.from_json.read_text(encoding="utf-8")) if options.from_json else run(options)
    tables = markdown(result)
    print(tables)
    if not options.from_json:
        _write(options.json, json.dumps(result, indent=1))
    if options.markdown:
        before, _, rest = options.markdown.read_text(encoding="utf-8").partition(BEGIN)
        _, end, after = rest.partition(END)
        if not end:
            parser.error(f"{options.markdown} has no lines {BEGIN!r} and {END!r}")
        _write(options.markdown, f"{before}{BEGIN}\n{tables}{END}{after}")


def _write(path: Path, text: str) -> None:
    make_folder(path.parent)
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()

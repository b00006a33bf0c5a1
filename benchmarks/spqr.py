"""SpQR's product beside torch's dense ones and beside the memory's rate, in one run: times, shares, ratios.

    python benchmarks/spqr.py --outliers 0.01
    python benchmarks/spqr.py --shapes 4096x4096 8192x28672 --storage ptcsr --fused

Contestants take turns; minima are compared. Bytes are the packed ones; the limit is what all threads together read
(`torch.sum` of as many bytes). Goals, at every shape: at least 3 times torch's dense bf16, and 0.5 of the read
bandwidth. The errors of the products are relative to Σ |w · x|, against the decoded weights in double precision.
`stages` are one core's nanoseconds a word, out of the caches. `--fused` leaves out the ways that decode first. Writes
results/benchmarks/spqr.json.
"""

import argparse
import time

import reports
import torch

from toolkit.kernels import csr, dense, spqr

GOALS = {"times_torch_bf16": 3.0, "share_of_read": 0.5}
READ, BF16, OURS = "read", "torch, dense bfloat16", "auto"
FUSED = ("avx512_int16", "avx2")
OTHER_BYTES = 128 << 20  # more than caches hold
CACHED_ROWS = 256  # whose words the second cache holds
ERROR_ROWS = 256


def matrix(rows: int, columns: int, share: float, storage: str) -> tuple[torch.Tensor, csr.Outliers]:
    """Random words and outliers. Their values change no time; statistics are such that weights are of the order 1."""
    generator = torch.Generator().manual_seed(0)
    tall, wide = spqr.tiles((rows, columns))
    parts = [
        torch.randint(0, spqr.LEVELS, size, generator=generator, dtype=torch.uint8)
        for size in ((rows, columns), (rows, wide), (rows, wide))
    ]
    second_order = torch.randn(tall, wide, 4, generator=generator) * torch.tensor([0.1, 0.5, 2, 1])
    count = round(share * rows * columns)
    places = torch.randint(0, rows * columns, (count,), generator=generator).unique()
    values = torch.randn(len(places), generator=generator).half()
    outliers = csr.encode(storage, (rows, columns), places // columns, places % columns, values)
    return spqr.pack(spqr.Codes(*parts, second_order.half())), outliers


def measure(runs: dict, repetitions: int, pause_s: float = 0) -> dict[str, float]:
    """The least seconds of each. Before every run its data leave the caches, and there may be a pause."""
    others = torch.ones(OTHER_BYTES // 8, dtype=torch.int64)
    best = dict.fromkeys(runs, float("inf"))
    for run in runs.values():
        run()
    for _ in range(repetitions):
        for name, run in runs.items():
            others.sum()
            time.sleep(pause_s)
            start = time.perf_counter()
            run()
            best[name] = min(best[name], time.perf_counter() - start)
    return best


def measure_cached(runs: dict, repetitions: int) -> dict[str, float]:
    """The least seconds of each, where one run follows the other."""
    best = dict.fromkeys(runs, float("inf"))
    for name, run in runs.items():
        for _ in range(1 + repetitions):
            start = time.perf_counter()
            run()
            best[name] = min(best[name], time.perf_counter() - start)
    return best


def contestants(words: torch.Tensor, outliers: csr.Outliers, vectors: torch.Tensor, fused: bool) -> dict:
    """The runs, by name."""
    rows, columns = outliers.shape
    data = torch.ones((words.nbytes + outliers.col_vals.nbytes) // 8, dtype=torch.int64)
    bf16, x = torch.randn(rows, columns, dtype=torch.bfloat16), vectors[0].contiguous()
    integers, out, x_bf16 = torch.ones(rows, columns, dtype=torch.int8), torch.zeros(rows), x.bfloat16()
    without, some = csr.no_outliers(outliers.shape), vectors.bfloat16()
    found = {READ: data.sum, BF16: lambda: bf16 @ x_bf16, "int8": lambda: dense.matvec(integers, x, out)}
    for name in (OURS, *FUSED) if fused else (OURS, *spqr.BACKENDS.available()):
        if name in (OURS, *spqr.BACKENDS.available()):
            found[name] = lambda name=name: spqr.matvec(words, outliers, x, out, name)
    found |= {
        f"{OURS}, no outliers": lambda: spqr.matvec(words, without, x, out),
        f"{OURS}, {len(vectors)} vectors": lambda: spqr.matvec(words, outliers, vectors),
        f"{BF16}, {len(vectors)} vectors": lambda: some @ bf16.T,
    }
    if not fused:
        decoded = torch.zeros(rows, columns, dtype=torch.bfloat16)
        found["decode to bfloat16"] = lambda: spqr.decode(words, outliers, decoded)
    return found


def stages(columns: int, share: float, storage: str, repetitions: int) -> dict[str, float]:
    """One core's nanoseconds a word where the second cache holds the words."""
    words, outliers = matrix(CACHED_ROWS, columns, share, storage)
    without, x, threads = csr.no_outliers(outliers.shape), torch.randn(columns), torch.get_num_threads()
    torch.set_num_threads(1)
    runs = {
        f"{name}, {label}": lambda name=name, some=some: spqr.matvec(words, some, x, None, name)
        for name in FUSED
        if name in spqr.BACKENDS.available()
        for label, some in ((storage, outliers), ("no outliers", without))
    }
    best = measure_cached(runs, 20 * repetitions)
    torch.set_num_threads(threads)
    return {name: seconds / words.numel() * 1e9 for name, seconds in best.items()}


def errors(columns: int, share: float, storage: str) -> dict[str, float]:
    """The root of the mean squared error of each product, over that of Σ |w · x|."""
    words, outliers = matrix(ERROR_ROWS, columns, share, storage)
    x, weight = torch.randn(columns), spqr.decode(words, outliers).double()
    exact, magnitude = weight @ x.double(), weight.abs() @ x.double().abs()
    found = {name: spqr.matvec(words, outliers, x, backend=name) - exact for name in spqr.BACKENDS.available()}
    return {
        name: float(error.square().mean().sqrt() / magnitude.square().mean().sqrt()) for name, error in found.items()
    }


def table(rows: int, columns: int, options: argparse.Namespace) -> list[dict]:
    """One row for each contestant at this shape."""
    words, outliers = matrix(rows, columns, options.outliers, options.storage)
    vectors = torch.randn(options.batch, columns, generator=torch.Generator().manual_seed(1))
    nbytes = words.nbytes + outliers.offsets.nbytes + outliers.col_vals.nbytes
    runs = contestants(words, outliers, vectors, options.fused)
    best = measure(runs, options.repetitions, options.pause_ms / 1e3)
    print(f"{rows} × {columns}, {8 * nbytes / rows / columns:.2f} bits a weight")
    found = [
        {
            "rows": rows,
            "columns": columns,
            "contestant": name,
            "minimum_ms": seconds * 1e3,
            "packed_gb_s": nbytes / seconds / 1e9,
            "share_of_read": best[READ] / seconds,
            "times_torch_bf16": best[BF16] / seconds,
        }
        for name, seconds in best.items()
    ]
    for row in found:
        print(
            f"{row['contestant']:34} {row['minimum_ms']:9.2f} ms {row['packed_gb_s']:6.1f} GB/s "
            f"{row['share_of_read']:.2f} of reads {row['times_torch_bf16']:6.2f} x torch's bf16"
        )
    return found


def main() -> int:
    """Measure; 0 if the goals are met."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", default=["4096x4096"], metavar="ROWSxCOLUMNS")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--repetitions", type=int, default=25)
    parser.add_argument("--outliers", type=float, default=0.01)
    parser.add_argument("--storage", choices=csr.STORAGES, default="csr")
    parser.add_argument("--fused", action="store_true", help="leave out the ways that decode first")
    parser.add_argument("--pause-ms", type=float, default=2, help="before every run: OpenMP's threads spin for a while")
    options = parser.parse_args()
    shapes = [tuple(map(int, shape.split("x"))) for shape in options.shapes]
    rows = [row for shape in shapes for row in table(*shape, options)]
    columns = shapes[0][1]
    of_stages = stages(columns, options.outliers, options.storage, options.repetitions)
    of_products = errors(columns, options.outliers, options.storage)
    for name, nanoseconds in of_stages.items():
        print(f"{name:34} {nanoseconds:9.3f} ns a word, one core, cached")
    for name, error in of_products.items():
        print(f"{name:34} {error:9.1e} error")
    ours = [row for row in rows if row["contestant"] == OURS]
    met = {name: all(row[name] >= least for row in ours) for name, least in GOALS.items()}
    print(f"goals {GOALS}: met {met}; load a core {reports.load_per_core():.1f}")
    settings = vars(options) | {"threads": torch.get_num_threads(), "load_per_core": reports.load_per_core()}
    report = {"settings": settings, "goals": GOALS, "met": met, "rows": rows}
    reports.save("spqr", report | {"stages": of_stages, "errors": of_products})
    return int(not all(met.values()))


if __name__ == "__main__":
    raise SystemExit(main())

"""Judges the CUDA kernels on this machine's GPU, in some ten minutes: are they right, and how fast are they?

    python benchmarks/gpu.py                  # everything
    python benchmarks/gpu.py --only spqr      # operations whose name contains a word
    python benchmarks/gpu.py --simulate       # without a GPU: small matrices in Numba's simulator; nothing is timed

1. Every kernel is set against its oracle, a product of dense weights in fp64, at small, odd and large shapes.
2. It is timed beside its rivals (cuBLAS, cuSPARSE, torch) and beside its byte limit: the bytes that it must at least
   read and write, at the rate of a copy on the device. Contestants take turns. Before each run, reading two gigabytes
   flushes the L2 cache and keeps the GPU busy while the host launches what is timed. Medians are compared.
3. `sparse-offload run --device cuda` writes text with a small model, packed in three ways.

It prints one table and writes results/benchmarks/gpu.json. Exit status: 0 if all results are right, 1 if one is
wrong, 77 without a GPU.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path

if "--simulate" in sys.argv:  # Numba reads it as it is imported
    os.environ["NUMBA_ENABLE_CUDASIM"] = "1"

import reports
import torch
from neuron_records import random_records
from spqr import matrix
from torch import Tensor
from torch.nn import functional

from toolkit.kernels import bitmap, csr, neurons, spqr
from toolkit.quantization import neuron_records

NO_GPU = 77
ODD = [(1, 1), (17, 40), (33, 4100), (300, 5000)]
LARGE = [(4096, 4096), (28_672, 8192)]
TINY = [(3, 20)]
NEURONS, TINY_NEURONS = [(1, 64), (33, 576), (14_336, 4096)], [(3, 64)]  # rows, hidden
BATCHES = (1, 3, 16)
SHARE = 0.01  # of outliers
FLUSH_BYTES = 2 << 30
OURS, COPY, CUBLAS, CUSPARSE, TORCH = "ours", "device copy", "cuBLAS fp16", "cuSPARSE CSR fp16", "torch, same rows"
MODEL, PROMPT, TOKENS = "smollm2-135m", "The three laws of motion say that", 32
PACKED = {"endor": "--method wanda --format endor", "spqr": "--method spqr", "dense": "--method dense --format dense"}


@dataclass
class Operation:
    """One operation on one matrix: what runs, what it must give, and the bytes that it must read and write."""

    name: str
    shape: str
    run: Callable[[], Tensor]
    expected: Tensor
    bound: Tensor | float  # of the error
    nbytes: int
    rivals: dict[str, Callable[[], Tensor]] = field(default_factory=dict)
    timed: bool = False

    def is_right(self) -> bool:
        """Whether every number is within the bound. A bound of 0 asks for equality to the bit."""
        error = (self.run().double() - self.expected.double()).abs()
        return bool((error <= self.bound).all())


def operations(device: str, simulated: bool) -> Iterator[Operation]:
    """All of them, one after the other, since large matrices leave room for few."""
    shapes = TINY if simulated else ODD + LARGE
    batches = BATCHES[:2] if simulated else BATCHES
    for shape in shapes:
        timed = shape in LARGE
        yield from _of_bitmap(shape, batches, device, timed)
        yield from _of_spqr(shape, batches, device, timed)
    for (rows, hidden), bits in product(TINY_NEURONS if simulated else NEURONS, (None, 4, 2)):
        yield from _of_neurons(rows, hidden, bits, batches, device, timed=rows > 1000)


def _of_bitmap(shape: tuple[int, int], batches: tuple[int, ...], device: str, timed: bool) -> Iterator[Operation]:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(shape, generator=generator).half()
    weight = weight.masked_fill(torch.rand(shape, generator=generator) < 0.5, 0)
    packed, weight, label = bitmap.encode(weight).to(device), weight.to(device), _label(shape)
    nbytes = sum(part.nbytes for part in (packed.bitmap, packed.row_offsets, packed.block_offsets, packed.values))
    out, other = torch.full_like(weight, 3), torch.empty_like(weight)

    def decompress() -> Tensor:
        return bitmap.decompress(packed, out, "cuda")

    copying = {COPY: lambda: other.copy_(weight)}
    yield Operation("bitmap decompress", label, decompress, weight, 0.0, nbytes + out.nbytes, copying, timed)
    sparse = _csr(weight) if timed else None
    for batch in batches:
        x = _vectors(batch, shape[1], device)

        def multiply(x=x) -> Tensor:
            return bitmap.matvec(packed, x, backend="cuda")

        rivals = _products(weight, x)
        if sparse is not None and batch == 1:
            rivals[CUSPARSE] = lambda x=x: sparse @ x[0]
        name, moved = f"bitmap product, {batch}", nbytes + x.nbytes + 4 * batch * shape[0]
        yield Operation(name, label, multiply, *_product(weight, x), moved, rivals, timed)


def _of_spqr(shape: tuple[int, int], batches: tuple[int, ...], device: str, timed: bool) -> Iterator[Operation]:
    for storage in csr.STORAGES:
        words, outliers = matrix(*shape, SHARE if timed else 0.2, storage)
        weight = spqr.decode(words, outliers, backend="table").to(device)
        words, outliers = words.to(device), outliers.to(device)
        yield from _of_outliers(outliers, batches, device, timed)
        nbytes, half = words.nbytes + _nbytes(outliers), weight.half()
        out, other = torch.empty_like(half), torch.empty_like(half)
        for way in spqr.FOR_GPUS:
            name = f"{way.removeprefix('cuda_')}, {storage}"

            def decode(way=way, words=words, outliers=outliers, out=out) -> Tensor:
                return spqr.decode(words, outliers, out, way)

            copying = {COPY: lambda half=half, other=other: other.copy_(half)}
            moved = nbytes + out.nbytes
            yield Operation(f"spqr decode by {name}", _label(shape), decode, half, 0.0, moved, copying, timed)
            for batch in batches:
                x = _vectors(batch, shape[1], device)

                def multiply(x=x, way=way, words=words, outliers=outliers) -> Tensor:
                    return spqr.matvec(words, outliers, x, backend=way)

                moved = nbytes + x.nbytes + 4 * batch * shape[0]
                found = _product(weight, x)
                rivals = _products(half, x)
                name_of_product = f"spqr product by {name}, {batch}"
                yield Operation(name_of_product, _label(shape), multiply, *found, moved, rivals, timed)


def _of_outliers(outliers: csr.Outliers, batches: tuple[int, ...], device: str, timed: bool) -> Iterator[Operation]:
    rows, columns, values = outliers.to("cpu").entries()
    dense = torch.zeros(outliers.shape, dtype=torch.float16)
    dense[rows, columns] = values
    dense = dense.to(device)
    for batch in batches[:1] if timed else batches:
        x = _vectors(batch, outliers.shape[1], device)

        def multiply(x=x) -> Tensor:
            return csr.add_matvec(outliers, x, torch.zeros(len(x), outliers.shape[0], device=device), "cuda")

        moved = _nbytes(outliers) + x.nbytes + 8 * batch * outliers.shape[0]
        name = f"outliers as {outliers.name}, {batch}"
        yield Operation(name, _label(outliers.shape), multiply, *_product(dense, x), moved, {}, timed)


def _of_neurons(
    rows: int, hidden: int, bits: int | None, batches: tuple[int, ...], device: str, timed: bool
) -> Iterator[Operation]:
    if bits is None:
        generator = torch.Generator().manual_seed(0)
        parts = [torch.randn(rows, hidden, generator=generator) * size for size in (hidden**-0.5, hidden**-0.5, 1)]
        given = torch.cat([part.half() for part in parts], 1)
        parts = [part.half() for part in parts]
    else:
        given = random_records(rows, hidden, bits)
        parts = neuron_records.decode(given, hidden, bits)
    given, (gate, up, down) = given.to(device), (part.to(device) for part in parts)
    halves = [part.half() for part in (gate, up, down)]
    for batch in batches:
        x = _vectors(batch, hidden, device).float()

        def compute(x=x) -> Tensor:
            return neurons.ffn(given, x, "silu", bits=bits, backend="cuda")

        def by_torch(x=x) -> Tensor:
            (first, second, third), x = halves, x.half()
            return functional.silu(x @ first.T) * (x @ second.T) @ third

        values = functional.silu(x.double() @ gate.double().T) * (x.double() @ up.double().T)
        bound = 2e-5 * values.abs() @ down.double().abs() + 2e-8 * float(x.double().abs().sum())
        name = f"neurons{'' if bits is None else f' in {bits} bits'}, {batch}"
        moved = given.nbytes + 2 * x.nbytes
        expected = values @ down.double()
        yield Operation(name, _label((rows, hidden)), compute, expected, bound, moved, {TORCH: by_torch}, timed)


def _label(shape: tuple[int, int]) -> str:
    return "x".join(map(str, shape))


def _nbytes(outliers: csr.Outliers) -> int:
    return outliers.offsets.nbytes + outliers.col_vals.nbytes


def _vectors(batch: int, columns: int, device: str) -> Tensor:
    return torch.randn(batch, columns, generator=torch.Generator().manual_seed(batch)).half().to(device)


def _product(weight: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """The product in fp64, some rows at a time, and what fp32 sums may err by."""
    given, expected, bound = x.double(), [], []
    for rows in weight.split(2048):
        expected.append(given @ rows.double().T)
        bound.append(1e-5 * given.abs() @ rows.double().abs().T)
    return torch.cat(expected, 1), torch.cat(bound, 1) + 1e-12


def _products(half: Tensor, x: Tensor) -> dict[str, Callable[[], Tensor]]:
    """A matrix-vector product where there is one vector, as cuBLAS has them."""
    return {CUBLAS: (lambda: torch.mv(half, x[0])) if len(x) == 1 else lambda: torch.mm(x, half.T)}


def _csr(weight: Tensor) -> Tensor:
    """With 32-bit indices, which cuSPARSE reads faster than torch's own 64-bit ones."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse")  # it is in beta
        found = weight.to_sparse_csr()
        indices = found.crow_indices().int(), found.col_indices().int()
        return torch.sparse_csr_tensor(*indices, found.values(), found.shape)


def seconds(runs: dict[str, Callable[[], Tensor]], repetitions: int, flush: Tensor) -> dict[str, float]:
    """Medians on the device. Runs take turns, after one that warms up."""
    for run in runs.values():
        run()
    spent = {name: [] for name in runs}
    for _ in range(repetitions):
        for name, run in runs.items():
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            flush.sum()
            begin.record()
            run()
            end.record()
            torch.cuda.synchronize()
            spent[name].append(begin.elapsed_time(end) / 1e3)
    return {name: statistics.median(times) for name, times in spent.items()}


def generated() -> list[dict]:
    """Tokens a second of the small model, packed in three ways; or the last line of what went wrong."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name, how in PACKED.items():
            place, command = Path(folder) / name, [sys.executable, "-P", "-m", "toolkit"]
            packing = [*command, "pack", MODEL, *how.split(), "--windows", "2", "--no-evaluate", "--out", str(place)]
            running = [*command, "run", str(place), "--device", "cuda", "--prompt", PROMPT]
            running += ["--max-new-tokens", str(TOKENS)]
            for step in (packing, running):
                done = subprocess.run(step, capture_output=True, text=True)
                if done.returncode:
                    break
            lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
            rows.append({"packed": name, "right": done.returncode == 0, "said": lines[-1] if lines else ""})
    return rows


def judged(operation: Operation, repetitions: int, flush: Tensor | None, copy_gb_s: float) -> dict:
    """One row of the table. Seconds are there only for operations that are timed."""
    row = {"operation": operation.name, "shape": operation.shape, "right": operation.is_right()}
    if flush is None or not operation.timed:
        return row
    found = seconds({OURS: operation.run} | operation.rivals, repetitions, flush)
    gb_s = operation.nbytes / found[OURS] / 1e9
    row |= {"seconds": found[OURS], "gb_s": gb_s, "share_of_limit": gb_s / copy_gb_s}
    return row | {"times": {name: found[name] / found[OURS] for name in operation.rivals}}


def line(row: dict) -> str:
    """A row for people."""
    text = f"{row['operation']:38} {row['shape']:>11}  {'right' if row['right'] else '**WRONG**'}"
    if "seconds" in row:
        text += f" {row['seconds'] * 1e6:10.1f} µs {row['gb_s']:7.0f} GB/s {row['share_of_limit']:5.2f} of the limit"
        text += "".join(f"; {times:.2f} x {name}" for name, times in row["times"].items())
    return text


def main() -> int:
    """Check, time, generate; see the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--simulate", action="store_true", help="check small matrices in Numba's simulator")
    parser.add_argument("--only", default="", help="operations whose name contains this word")
    parser.add_argument("--repetitions", type=int, default=20)
    options = parser.parse_args()
    if not options.simulate and not torch.cuda.is_available():
        print("skipped: no CUDA device; --simulate checks small matrices without one")
        return NO_GPU
    begun, device, rows, flush, copy_gb_s = time.perf_counter(), "cpu", [], None, 0.0
    if not options.simulate:
        device, flush = "cuda", torch.ones(FLUSH_BYTES // 4, device="cuda")
        other = torch.empty_like(flush)
        copying = seconds({COPY: lambda: other.copy_(flush)}, options.repetitions, flush)
        copy_gb_s = 2 * FLUSH_BYTES / copying[COPY] / 1e9
        del other
        print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}: a copy moves {copy_gb_s:.0f} GB/s")
    for operation in operations(device, options.simulate):
        if options.only in operation.name:
            rows.append(judged(operation, options.repetitions, flush, copy_gb_s))
            print(line(rows[-1]), flush=True)
    texts = [] if options.simulate or options.only else generated()
    for text in texts:
        print(f"run --device cuda, {text['packed']:23} {'right' if text['right'] else '**FAILED**'} {text['said']}")
    wrong = sum(not row["right"] for row in rows + texts)
    print(f"{len(rows) + len(texts)} checks, {wrong} wrong, {time.perf_counter() - begun:.0f} s")
    reports.save("gpu", {"copy_gb_s": copy_gb_s, "simulated": options.simulate, "rows": rows, "generated": texts})
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())

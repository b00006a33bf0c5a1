"""The checks of `gpu.py`, which runs this file as a process of its own: a kernel that breaks the GPU ends only that.

It prints a line of JSON before each check and a row after it. See `gpu.py` for what is checked.
"""

import argparse
import json
import os
import statistics
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

if "--simulate" in sys.argv:  # Numba reads it as it is imported
    os.environ["NUMBA_ENABLE_CUDASIM"] = "1"

import bare  # noqa: F401 - the first: it makes `toolkit` importable
import torch
from neuron_records import random_records
from spqr import matrix
from torch import Tensor
from torch.nn import functional

from toolkit.kernels import bitmap, csr, neurons, spqr
from toolkit.quantization import neuron_records

SHARE = 0.01  # of outliers
FLUSH_BYTES = 2 << 30
OURS, COPY, CUBLAS, CUSPARSE, TORCH = "ours", "device copy", "cuBLAS fp16", "cuSPARSE CSR fp16", "torch, same rows"
BROKEN = 3  # exit status: the GPU no longer works in this process


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

    def row(self, clock: "Clock | None") -> dict:
        """Whether every number is within the bound (0 asks for equality to the bit), and times if there is a clock."""
        error = (self.run().double() - self.expected.double()).abs()
        found = {"right": bool((error <= self.bound).all()), "error": float(error.max())}
        if clock is None or not self.timed:
            return found
        spent = clock.seconds({OURS: self.run} | self.rivals)
        gb_s = self.nbytes / spent[OURS] / 1e9
        found |= {"seconds": spent[OURS], "gb_s": gb_s, "share_of_limit": gb_s / clock.copy_gb_s}
        return found | {"times": {name: spent[name] / spent[OURS] for name in self.rivals}}


class Clock:
    """Times on the GPU."""

    def __init__(self, repetitions: int):
        self.repetitions, self.flush = repetitions, torch.ones(FLUSH_BYTES // 4, device="cuda")
        other = torch.empty_like(self.flush)
        self.copy_gb_s = 2 * FLUSH_BYTES / self.seconds({COPY: lambda: other.copy_(self.flush)})[COPY] / 1e9

    def seconds(self, runs: dict[str, Callable[[], Tensor]]) -> dict[str, float]:
        """Medians on the device. Runs take turns, after one that warms up."""
        for run in runs.values():
            run()
        spent = {name: [] for name in runs}
        for _ in range(self.repetitions):
            for name, run in runs.items():
                begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                self.flush.sum()
                begin.record()
                run()
                end.record()
                torch.cuda.synchronize()
                spent[name].append(begin.elapsed_time(end) / 1e3)
        return {name: statistics.median(times) for name, times in spent.items()}


def checks_of(group: dict, device: str, simulated: bool) -> Iterator:
    """The checks of a group of `gpu.py`, one after the other, since large matrices leave room for few."""
    timed = group["timed"] and not simulated
    if group["kind"] == "text":
        import gpu_texts  # what the kernels do without

        yield from gpu_texts.texts(device, simulated)
    for shape in map(tuple, group["shapes"]):
        if group["kind"] == "bitmap":
            yield from _of_bitmap(shape, group["batches"], device, timed)
        elif group["kind"] == "spqr":
            yield from _of_spqr(shape, group["batches"], device, timed)
        else:
            for bits in (None, 4, 2):
                yield from _of_neurons(*shape, bits, group["batches"], device, timed)


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


def run(groups: list[dict], start: tuple[int, int], options: argparse.Namespace, tell: Callable[[dict], None]) -> int:
    """Make all checks from `start` on (group, check) and tell each row. Returns `BROKEN` if the GPU no longer works."""
    device = "cpu" if options.simulate else "cuda"
    clock = None
    for number, group in list(enumerate(groups))[start[0] :]:
        if group["timed"] and clock is None and not options.simulate:
            clock = Clock(options.repetitions)
            tell({"copy_gb_s": clock.copy_gb_s})
        checks = enumerate(checks_of(group, device, options.simulate))
        while True:
            about = {"operation": "all", "shape": group["kind"]}
            try:
                place, check = next(checks)
                about = {"operation": check.name, "shape": check.shape}
                if (number, place) < start or options.only not in check.name:
                    continue
                tell({"begins": [number, place], **about})
                found = check.row(clock)
            except StopIteration:
                break
            except Exception as error:
                found = {"right": False, "failed": " ".join(f"{type(error).__name__}: {error}".split())[:200]}
            tell({**about, **found})
            if not (options.simulate or works()):
                return BROKEN
    return 0


def works() -> bool:
    """Whether the GPU still does: after an illegal address it does nothing more for this process."""
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


def main() -> int:
    """Run the groups that standard input has, from the check on that the arguments name."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("start", nargs=2, type=int)
    parser.add_argument("--simulate", action="store_true")
    parser.add_argument("--only", default="")
    parser.add_argument("--repetitions", type=int, default=20)
    options = parser.parse_args()
    told = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what libraries print is no row
    return run(
        json.load(sys.stdin), tuple(options.start), options, lambda line: print(json.dumps(line), file=told, flush=True)
    )


if __name__ == "__main__":
    sys.exit(main())

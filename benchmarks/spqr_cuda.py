"""The CUDA kernels of SpQR beside their rivals on this machine's GPU: times, shares of the limit, ratios, goals.

    python benchmarks/spqr_cuda.py [--repetitions 50] [--shapes 4096x4096 11008x4096 28672x8192]

Random 3-bit weights with 1 % of outliers. Every contestant's result is checked first. Then they take turns
(`gpu_turns.py`). Both ways of converting codes run (thesis, figure 3.2), each with outliers as CSR and as PTCSR
(figures 4.1 and 4.2). Bytes are those of the packed matrix and of the vectors. Writes
results/benchmarks/spqr_cuda.json.
"""

import sys

import torch
from gpu_turns import COPY, DEVICE, Contestant, Goal, compare, options
from spqr import matrix

from toolkit.kernels import csr, spqr

SHAPES = ["4096x4096", "11008x4096", "28672x8192"]
BATCHES = [1, 2, 4, 8, 16]
OUTLIERS = 0.01
CUBLAS = "cuBLAS fp16"
OURS = "cuda_table, csr"
GOALS = [Goal(OURS, "matvec, batch 1", COPY, "bandwidth", 0.5), Goal(OURS, "matvec, batch 1", CUBLAS, "time", 2.5)]


def _contestants(rows: int, columns: int) -> list[Contestant]:
    """Each with its inputs on the device, its output allocated, and its result checked."""
    packed = {}
    for storage in csr.STORAGES:
        words, outliers = matrix(rows, columns, OUTLIERS, storage)
        packed[storage] = words.to(DEVICE), outliers.to(DEVICE)
    weight = spqr.decode(*packed["csr"], backend="cuda_table")
    if not torch.equal(weight.cpu(), spqr.decode(*matrix(rows, columns, OUTLIERS, "csr"))):
        raise SystemExit(f"decode of {rows}x{columns}: the GPU's weights differ from the CPU's")
    half = weight.half()
    field = _decoders(packed, half)
    generator = torch.Generator(DEVICE).manual_seed(0)
    for batch in BATCHES:
        x = torch.randn(batch, columns, generator=generator, device=DEVICE).half()
        field += _products(packed, weight, half, x)
    return field


def _decoders(packed: dict, half: torch.Tensor) -> list[Contestant]:
    out = torch.empty_like(half)
    found = [Contestant("decode", COPY, 2 * half.nbytes, lambda: out.copy_(half))]
    for way in spqr.FOR_GPUS:
        for storage, (words, outliers) in packed.items():
            nbytes = words.nbytes + outliers.offsets.nbytes + outliers.col_vals.nbytes + out.nbytes

            def run(words=words, outliers=outliers, way=way):
                return spqr.decode(words, outliers, out, way)

            if not torch.equal(run(), half):
                raise SystemExit(f"decode of {list(half.shape)}: wrong result of {way}, {storage}")
            found.append(Contestant("decode", f"{way}, {storage}", nbytes, run))
    return found


def _products(packed: dict, weight: torch.Tensor, half: torch.Tensor, x: torch.Tensor) -> list[Contestant]:
    operation, batch = f"matvec, batch {len(x)}", len(x)
    y = torch.empty(batch, len(weight), device=DEVICE)
    y_half = y.half()
    found = [_dense(operation, half, x, y_half)]
    for way in spqr.FOR_GPUS:
        for storage, (words, outliers) in packed.items():
            nbytes = words.nbytes + outliers.offsets.nbytes + outliers.col_vals.nbytes + x.nbytes + y.nbytes

            def run(words=words, outliers=outliers, way=way):
                return spqr.matvec(words, outliers, x, y, way)

            found.append(Contestant(operation, f"{way}, {storage}", nbytes, run))
    expected, magnitude = x.double() @ weight.double().T, x.double().abs() @ weight.double().abs().T
    for contestant in found:
        tolerance = 1e-2 if contestant.name == CUBLAS else 1e-5  # cuBLAS rounds weights and results to fp16
        if not ((contestant.run().view(batch, -1) - expected).abs() <= tolerance * magnitude).all():
            raise SystemExit(f"{operation} of {list(weight.shape)}: wrong result of {contestant.name}")
    if batch == 1:  # by its bandwidth products are judged
        out = torch.empty_like(half)
        found.append(Contestant(operation, COPY, 2 * half.nbytes, lambda: out.copy_(half)))
    return found


def _dense(operation: str, half: torch.Tensor, x: torch.Tensor, out: torch.Tensor) -> Contestant:
    nbytes = half.nbytes + x.nbytes + out.nbytes
    if len(x) == 1:  # a matrix-vector product, as cuBLAS has one
        return Contestant(operation, CUBLAS, nbytes, lambda: torch.mv(half, x[0], out=out[0]))
    return Contestant(operation, CUBLAS, nbytes, lambda: torch.mm(x, half.T, out=out))


def main() -> int:
    """Compare; 0 if all goals are met, 1 if not, 77 without a GPU."""
    return compare("spqr_cuda", _contestants, GOALS, {"outliers": OUTLIERS}, options(__doc__, SHAPES))


if __name__ == "__main__":
    sys.exit(main())

"""The CUDA bitmap kernels beside their rivals on this machine's GPU: times, shares of the limit, ratios, goals.

    python benchmarks/bitmap_cuda.py [--repetitions 50] [--shapes 9216x9216 9216x36864 8192x28672]

fp16 at 50 % sparsity. Every contestant's result is checked first. Then they take turns (`gpu_turns.py`). Writes
results/benchmarks/bitmap_cuda.json.
"""

import sys
import warnings

import torch
from gpu_turns import COPY, DEVICE, Contestant, Goal, compare, options

from toolkit.formats import encode
from toolkit.kernels import bitmap

SHAPES = ["9216x9216", "9216x36864", "8192x28672"]
BATCHES = [1, 2, 4, 8, 16]
SPARSITY = 0.5
OURS, CUBLAS, CUSPARSE = "bitmap", "cuBLAS fp16", "cuSPARSE CSR fp16"
GOALS = [
    Goal(OURS, "decompress", COPY, "bandwidth", 0.7),
    Goal(OURS, "matvec, batch 1", CUBLAS, "time", 1.3),
    Goal(OURS, "matvec, batch 1", CUSPARSE, "time", 3),
]


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


def main() -> int:
    """Compare; 0 if all goals are met, 1 if not, 77 without a GPU."""
    settings = {"sparsity": SPARSITY, "dtype": "float16"}
    return compare("bitmap_cuda", _contestants, GOALS, settings, options(__doc__, SHAPES))


if __name__ == "__main__":
    sys.exit(main())

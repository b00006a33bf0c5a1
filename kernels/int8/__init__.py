"""Dense int8 matrices: their product with fp32 vectors.

torch has no such product on the CPU: it wants the weights widened first, or the vector in int8 too. One door, `matvec`;
`backend="auto"` takes the first of `available()`.
"""

import torch
from jaxtyping import Float, Float32, Int8
from torch import Tensor

from toolkit.kernels.int8 import cpu, cpu_simd
from toolkit.kernels.runtime.backends import Backend, choose, runnable
from toolkit.kernels.runtime.contracts import expect, operand
from toolkit.kernels.runtime.program import Product, Task

__all__ = ["BACKENDS", "available", "matvec"]


# fastest first; LLVM writes the first with wider registers where the CPU has them
BACKENDS = {
    "avx2": Backend(frozenset({"avx2", "fma"}), cpu_simd.matvec),
    "portable": Backend(frozenset(), cpu.matvec),
}


def matvec(
    weight: Int8[Tensor, "rows columns"],
    x: Float[Tensor, "*batch columns"],
    out: Float32[Tensor, "*batch rows"] | None = None,
    backend: str = "auto",
) -> Float32[Tensor, "*batch rows"]:
    """The product of an int8 matrix with `x`, [columns] or [batch, columns], as fp32 sums; the caller scales the rows.

    `x` is real, is taken as fp32 and may share memory with `out`. There is no gradient. The sums of a row depend on the
    backend only, not on the batch or the number of threads. The matrix is read from memory once for all vectors, while
    they fit in the caches.

    Raises `UserError` for a backend that is unknown or that this CPU cannot run, and `ValueError` for a `weight`, `x`
    or `out` of the wrong shape, type or device or that requires a gradient.
    """
    rows, columns = weight.shape
    batch = tuple(x.shape[:1] if x.ndim == 2 else ())
    expect("weight", weight, torch.int8, (rows, columns), torch.device("cpu"))
    expect("x", x, x.dtype, (*batch, columns), torch.device("cpu"))
    if out is None:
        out = torch.empty(*batch, rows, dtype=torch.float32)
    expect("out", out, torch.float32, (*batch, rows), torch.device("cpu"))
    vectors = batch[0] if batch else 1
    each_x, each_out = operand(x, out).to(torch.float32).view(vectors, columns), out.detach().view(vectors, rows)
    _task(weight, each_x, each_out, backend)()
    return out


def product(
    weight: Int8[Tensor, "rows columns"], x: Float32[Tensor, " columns"], out: Float32[Tensor, " rows"]
) -> Product:
    """The same product of one vector, to be run again and again with what `x` holds then.

    `x` and `out` are contiguous and share no memory.
    """
    return Product(_task(weight, x[None], out[None]))


def available() -> list[str]:
    """The backends that this CPU can run, fastest first."""
    return runnable(BACKENDS)


def _task(weight: Tensor, x: Tensor, out: Tensor, backend: str = "auto") -> Task:
    arguments = weight.numpy(), x.numpy(), out.numpy()
    return Task(choose(backend, BACKENDS).product, arguments, len(weight), weight.nbytes)

"""Dense matrices of fp32, fp16, bf16 or int8: their product with fp32 vectors, in fp32.

torch rounds the vector to the matrix's type and has no product of int8 and fp32 on the CPU, and its product does not
reach the memory's rate. One door, `matvec`; `backend="auto"` takes the first of `BACKENDS` that this CPU can run.
"""

import torch
from jaxtyping import Float32, Shaped
from torch import Tensor

from toolkit.kernels.engine.compiled import compiled
from toolkit.kernels.engine.parallel import Product, Task
from toolkit.kernels.engine.products import BACKENDS, dense_task
from toolkit.kernels.engine.tensors import BITS, CPU, expect, operands

__all__ = ["BACKENDS", "matvec", "product", "scale_rows", "take_rows"]


def matvec(
    weight: Shaped[Tensor, "rows columns"],
    x: Shaped[Tensor, "*batch columns"],
    out: Float32[Tensor, "*batch rows"] | None = None,
    backend: str = "auto",
) -> Float32[Tensor, "*batch rows"]:
    """The product of a contiguous matrix with `x`, [columns] or [batch, columns], as fp32 sums.

    `x` is real, has any strides, is taken as fp32 and may share memory with `out`. There is no gradient. The sums of a
    row depend on the backend only, not on the batch or the number of threads. The matrix is read from memory once for
    all vectors, while they fit in the caches.

    Raises `UserError` for a backend that is unknown or that this CPU cannot run, and `ValueError` for a `weight`, `x`
    or `out` of the wrong shape, type or device or that requires a gradient.
    """
    if weight.dtype not in BITS:
        raise ValueError(f"weight is {weight.dtype}; expected one of {', '.join(map(str, BITS))}")
    expect("weight", weight, weight.dtype, tuple(weight.shape), CPU)
    with operands(x, out, tuple(weight.shape), CPU) as (each_x, each_out, result):
        _task(weight, each_x.to(torch.float32), each_out, backend)()
    return result


def product(weight: Shaped[Tensor, "rows columns"], x: Float32[Tensor, " _"], out: Float32[Tensor, " _"]) -> Product:
    """The same product of one vector, to be run again and again with what `x` holds then.

    `x` and `out` are contiguous and share no memory.
    """
    return Product(_task(weight, x[None], out[None]))


@compiled
def scale_rows(y, scales):
    """Multiply each of `y` with its scale, in place."""
    for row in range(y.size):
        y[row] *= scales[row]


@compiled
def take_rows(y, source, out):
    """Row i of `out` becomes row `source[i]` of `y`."""
    for row in range(out.size):
        out[row] = y[source[row]]


def _task(weight: Tensor, x: Tensor, out: Tensor, backend: str = "auto") -> Task:
    bits = weight.detach().view(BITS[weight.dtype]).numpy()
    return dense_task(weight.dtype, bits, x.numpy(), out.detach().numpy(), backend)

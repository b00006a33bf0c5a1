"""Dense matrices of fp32, fp16 or bf16: their product with an fp32 vector, in fp32.

torch rounds the vector to the matrix's type, and its product does not reach the memory's rate.
"""

import torch
from jaxtyping import Float, Float32
from torch import Tensor

from toolkit.kernels.common.elements import FLOAT_BITS
from toolkit.kernels.common.products import dense_product
from toolkit.kernels.common.simd import host_has
from toolkit.kernels.runtime.contracts import expect, operand
from toolkit.kernels.runtime.program import Product, Task

FEATURES = ("avx2", "fma", "f16c")  # without them torch's product is the faster one


def matvec(
    weight: Float[Tensor, "rows columns"], x: Float32[Tensor, " columns"], out: Float32[Tensor, " rows"] | None = None
) -> Float32[Tensor, " rows"]:
    """The product of a contiguous matrix with `x`, which may share memory with `out`. There is no gradient.

    Raises `ValueError` for a tensor of the wrong shape, type or device or that requires a gradient.
    """
    rows, columns = weight.shape
    cpu = torch.device("cpu")
    if weight.dtype not in FLOAT_BITS:
        raise ValueError(f"weight is {weight.dtype}; expected one of {', '.join(map(str, FLOAT_BITS))}")
    expect("weight", weight, weight.dtype, (rows, columns), cpu)
    expect("x", x, torch.float32, (columns,), cpu)
    out = torch.empty(rows, dtype=torch.float32) if out is None else out
    expect("out", out, torch.float32, (rows,), cpu)
    given = operand(x, out)
    if not all(map(host_has, FEATURES)):
        return out.copy_(weight @ given.to(weight.dtype))
    _task(weight, given, out)()
    return out


def product(
    weight: Float[Tensor, "rows columns"], x: Float32[Tensor, " columns"], out: Float32[Tensor, " rows"]
) -> Product | None:
    """The same product, to be run again and again with what `x` holds then; None where torch's is the faster one.

    `x` and `out` are contiguous and share no memory.
    """
    return Product(_task(weight, x, out)) if all(map(host_has, FEATURES)) else None


def _task(weight: Tensor, x: Tensor, out: Tensor) -> Task:
    bits = weight.detach().view(FLOAT_BITS[weight.dtype]).numpy()
    arguments = bits, x[None].numpy(), out.detach()[None].numpy()
    return Task(dense_product(weight.dtype), arguments, len(weight), weight.nbytes)

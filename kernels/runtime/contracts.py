"""The checks on the host before a kernel runs."""

import torch
from jaxtyping import Float, Float32
from torch import Tensor


def check_operand(x: Tensor) -> None:
    """Raise `ValueError` for a vector that a product cannot take: a complex one, or one that is not strided."""
    if x.is_complex() or x.layout != torch.strided:
        raise ValueError(f"x is {x.dtype}, {x.layout}: expected real numbers in a dense tensor")


def operand(x: Tensor, out: Tensor) -> Tensor:
    """`x` as a kernel may read it while it writes `out`: a copy if the two overlap, and cut off from autograd.

    Raises `ValueError` for an `x` that is complex or not strided, and where autograd would want a gradient: kernels
    have none.
    """
    check_operand(x)
    if torch.is_grad_enabled() and (x.requires_grad or out.requires_grad):
        raise ValueError("x or out requires a gradient, and this product has none: pass x.detach()")
    overlap = x.data_ptr() < out.data_ptr() + out.nbytes and out.data_ptr() < x.data_ptr() + x.nbytes
    return x.detach().clone() if overlap else x.detach()


def operands(
    x: Tensor, out: Tensor | None, shape: tuple[int, int], device: torch.device
) -> tuple[Float[Tensor, "vectors columns"], Float32[Tensor, "vectors rows"], Float32[Tensor, "*batch rows"]]:
    """`x` and `out` of a product with a matrix of this shape [rows, columns], as batches; then `out` as it is.

    `x` is [columns] or [batch, columns]; an `out` that is missing is made. Raises `ValueError` for tensors of the wrong
    shape, type or device, and as `operand` does.
    """
    (rows, columns), batch = shape, tuple(x.shape[:1] if x.ndim == 2 else ())
    expect("x", x, x.dtype, (*batch, columns), device)
    out = torch.empty(*batch, rows, dtype=torch.float32, device=device) if out is None else out
    expect("out", out, torch.float32, (*batch, rows), device)
    vectors = batch[0] if batch else 1
    return operand(x, out).view(vectors, columns), out.detach().view(vectors, rows), out


def expect(name: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...], device: torch.device) -> None:
    """Raise `ValueError` for a tensor that a kernel cannot take as it is."""
    if tensor.dtype != dtype or tuple(tensor.shape) != shape:
        raise ValueError(f"{name} is {tensor.dtype} {list(tensor.shape)}; expected {dtype} {list(shape)}")
    if tensor.device != device or not tensor.is_contiguous():
        raise ValueError(f"{name} must be contiguous and on {device}")

"""The checks of tensors on the host, before a kernel runs on their memory."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

import torch
from jaxtyping import Float, Float32
from torch import Tensor

from toolkit.errors import UserError

CPU = torch.device("cpu")
# the unsigned integers that hold the bits of each floating-point type, and of each type
FLOAT_BITS = {torch.float32: torch.uint32, torch.float16: torch.uint16, torch.bfloat16: torch.uint16}
BITS = FLOAT_BITS | {torch.int8: torch.uint8}


def check_gpu(name: str, device: torch.device) -> None:
    """Raise `UserError` unless CUDA kernels can run on tensors of this device: in Numba's simulator, the CPU."""
    if find_spec("numba_cuda") is None:
        raise UserError(f"backend {name!r} needs numba-cuda: pip install -e '.[cuda]'")
    if os.environ.get("NUMBA_ENABLE_CUDASIM") != "1":
        if not torch.cuda.is_available():
            raise UserError(f"backend {name!r} needs a CUDA GPU, and torch sees none; use backend='auto'")
        if device.type != "cuda":
            raise UserError(f"backend {name!r} works on a GPU; the tensors are on {device}: move them with .to('cuda')")


def check_operand(x: Tensor) -> None:
    """Raise `ValueError` for a vector that a product cannot take: a complex one, or one that is not strided."""
    if x.is_complex() or x.layout != torch.strided:
        raise ValueError(f"x is {x.dtype}, {x.layout}: expected real numbers in a dense tensor")


@contextmanager
def operands(
    x: Tensor, out: Tensor | None, shape: tuple[int, int], device: torch.device
) -> Iterator[tuple[Float[Tensor, "vectors columns"], Float32[Tensor, "vectors rows"], Float32[Tensor, "*batch rows"]]]:
    """`x` and `out` of a product with a matrix of this shape [rows, columns], as batches; then `out` as it is.

    `x` is [columns] or [batch, columns]; an `out` that is missing is made. Both may have any strides: the batches are
    contiguous, and the results reach `out` when the block ends. The vectors are a copy where `x` is not contiguous or
    shares memory with the results. Raises `ValueError` for tensors of the wrong shape, type or device, for an `x` that
    is complex or not strided, and where autograd would want a gradient: kernels have none.
    """
    (rows, columns), batch = shape, tuple(x.shape[:1] if x.ndim == 2 else ())
    check_operand(x)
    _expect_kind("x", x, x.dtype, (*batch, columns), device)
    out = torch.empty(*batch, rows, dtype=torch.float32, device=device) if out is None else out
    _expect_kind("out", out, torch.float32, (*batch, rows), device)
    if torch.is_grad_enabled() and (x.requires_grad or out.requires_grad):
        raise ValueError("x or out requires a gradient, and this product has none: pass x.detach()")
    given, results, vectors = x.detach().contiguous(), out.detach().contiguous(), batch[0] if batch else 1
    if _overlap(given, results):
        given = given.clone()
    yield given.view(vectors, columns), results.view(vectors, rows), out
    if not out.is_contiguous():
        out.detach().copy_(results)


def expect(name: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...], device: torch.device) -> None:
    """Raise `ValueError` for a tensor that a kernel cannot take as it is."""
    _expect_kind(name, tensor, dtype, shape, device)
    if not tensor.is_contiguous():
        raise ValueError(f"{name} must be contiguous")


def _expect_kind(name: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...], device: torch.device) -> None:
    if tensor.dtype != dtype or tuple(tensor.shape) != shape:
        raise ValueError(f"{name} is {tensor.dtype} {list(tensor.shape)}; expected {dtype} {list(shape)}")
    if tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device}; expected it on {device}")


def _overlap(x: Tensor, out: Tensor) -> bool:
    return x.data_ptr() < out.data_ptr() + out.nbytes and out.data_ptr() < x.data_ptr() + x.nbytes

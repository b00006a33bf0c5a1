"""Which backend of a family runs, and the checks on the host before it does."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec

import torch
from jaxtyping import Float, Float32
from torch import Tensor

from toolkit.errors import UserError, unknown
from toolkit.kernels.engine.simd import host_has

CPU = torch.device("cpu")
CUDA = "cuda"  # the name of kernels for GPUs, where a family has one kind
AVX2 = frozenset({"avx2", "fma", "f16c"})


@dataclass(frozen=True)
class Backend:
    """One way to run a family's kernels on a CPU.

    Args:
        features: what it needs of the CPU, by LLVM's names.
        product: the compiled function of rows that multiplies, or what makes it for types and sizes.
    """

    features: frozenset[str]
    product: Callable


class Backends(dict[str, Backend]):
    """A family's backends for CPUs, the fastest first, and the names of its kernels for GPUs."""

    def __init__(self, for_cpus: Mapping[str, Backend], for_gpus: Sequence[str] = (CUDA,)):
        super().__init__(for_cpus)
        self.for_gpus = for_gpus

    def available(self) -> list[str]:
        """The names that this CPU can run, in their order."""
        return [name for name, backend in self.items() if all(map(host_has, backend.features))]

    def choose(self, name: str, device: torch.device = CPU) -> Backend | str:
        """The backend of this name, or for "auto" the first for the device; one for GPUs is given as its name.

        Raises `UserError` for a name that is unknown, that this machine cannot run, or that works on another device.
        """
        if name not in ("auto", *self.for_gpus, *self):
            raise unknown("backend", name, ["auto", *self.for_gpus, *self])
        if name == "auto":
            name = self.for_gpus[0] if self.for_gpus and device.type == "cuda" else self.available()[0]
        if name in self.for_gpus:
            check_gpu(name, device)
            return name
        if device.type != "cpu":
            raise UserError(
                f"backend {name!r} works on the CPU; these tensors are on {device}: move them with .to('cpu')"
            )
        if missing := sorted(feature for feature in self[name].features if not host_has(feature)):
            needed, others = ", ".join(missing), ", ".join(self.available())
            raise UserError(f"backend {name!r} needs a CPU with {needed}; this one can run: {others}")
        return self[name]


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

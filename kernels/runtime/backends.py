"""The backends of a family, and which of them this machine can run."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec

import torch

from toolkit.errors import UserError, unknown
from toolkit.kernels.common.simd import host_has

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Backend:
    """One way to run a family's kernels on a CPU.

    Args:
        features: what it needs of the CPU, by LLVM's names.
        product: the compiled function of rows that multiplies, or what makes it for types and sizes.
    """

    features: frozenset[str]
    product: Callable


def runnable(backends: Mapping[str, Backend]) -> list[str]:
    """The backends that this CPU can run, in their order."""
    return [name for name, backend in backends.items() if all(map(host_has, backend.features))]


def check_runnable(name: str, backends: Mapping[str, Backend]) -> None:
    """Raise `UserError` that names the missing features unless this CPU can run the backend."""
    if not all(map(host_has, backends[name].features)):
        found = runnable(backends)
        missing = ", ".join(sorted(feature for feature in backends[name].features if not host_has(feature)))
        raise UserError(f"backend {name!r} needs a CPU with {missing}; this one can run: {', '.join(found)}")


def choose(name: str, backends: Mapping[str, Backend], device: torch.device = CPU, for_gpus: Sequence[str] = ()):
    """The backend of this name, or for "auto" the first for the device; one for GPUs is given as its name.

    Raises `UserError` for a name that is unknown, that this machine cannot run, or that works on another device.
    """
    if name not in ("auto", *for_gpus, *backends):
        raise unknown("backend", name, ["auto", *for_gpus, *backends])
    if name == "auto":
        name = for_gpus[0] if for_gpus and device.type == "cuda" else runnable(backends)[0]
    if name in for_gpus:
        check_gpu(name, device)
        return name
    if device.type != "cpu":
        raise UserError(f"backend {name!r} works on the CPU; these tensors are on {device}: move them with .to('cpu')")
    check_runnable(name, backends)
    return backends[name]


def check_gpu(name: str, device: torch.device) -> None:
    """Raise `UserError` unless CUDA kernels can run on tensors of this device: in Numba's simulator, the CPU."""
    if find_spec("numba_cuda") is None:
        raise UserError(f"backend {name!r} needs numba-cuda: pip install -e '.[cuda]'")
    if os.environ.get("NUMBA_ENABLE_CUDASIM") != "1":
        if not torch.cuda.is_available():
            raise UserError(f"backend {name!r} needs a CUDA GPU, and torch sees none; use backend='auto'")
        if device.type != "cuda":
            raise UserError(f"backend {name!r} works on a GPU; the tensors are on {device}: move them with .to('cuda')")

"""Which backend of a family runs on this machine."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from toolkit.errors import UserError, unknown
from toolkit.kernels.engine.simd import host_has

if TYPE_CHECKING:
    import torch

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

    def choose(self, name: str, device: "torch.device | None" = None) -> Backend | str:
        """The backend of this name, or for "auto" the first for the device; one for GPUs is given as its name.

        Without a device it is one for the CPU.

        Raises `UserError` for a name that is unknown, that this machine cannot run, or that works on another device.
        """
        if name not in ("auto", *self.for_gpus, *self):
            raise unknown("backend", name, ["auto", *self.for_gpus, *self])
        kind = "cpu" if device is None else device.type
        if name == "auto":
            name = self.for_gpus[0] if self.for_gpus and kind == "cuda" else self.available()[0]
        if name in self.for_gpus:
            from toolkit.kernels.engine.tensors import CPU, check_gpu

            check_gpu(name, device or CPU)
            return name
        if kind != "cpu":
            raise UserError(
                f"backend {name!r} works on the CPU; these tensors are on {device}: move them with .to('cpu')"
            )
        if missing := sorted(feature for feature in self[name].features if not host_has(feature)):
            needed, others = ", ".join(missing), ", ".join(self.available())
            raise UserError(f"backend {name!r} needs a CPU with {needed}; this one can run: {others}")
        return self[name]

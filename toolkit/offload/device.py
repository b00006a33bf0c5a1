"""The device that takes the products: the CPU, which reads weights in DRAM, or a GPU, to which they are copied.

`Cuda` is all that the runtime needs of a GPU: memory, copies from pinned memory, and waiting for launched work.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from importlib.util import find_spec

import numpy as np
import torch
from jaxtyping import UInt8
from torch import Tensor

from toolkit import memory_limits
from toolkit.errors import UserError
from toolkit.storage.buffers import aligned_buffer
from toolkit.storage.direct import BLOCK_BYTES

PORTABLE = 1  # cudaHostRegisterPortable: pinned for every context
MB = 1e6


class Cpu(AbstractContextManager):
    """The CPU. Its work is done when a call returns, so nothing is ever waited for."""

    tier, torch_device = "dram", torch.device("cpu")
    within_memory = staticmethod(nullcontext)  # the system reports memory that runs out

    def empty(self, nbytes: int) -> UInt8[Tensor, " nbytes"]:
        """Memory, all of it touched."""
        return torch.zeros(nbytes, dtype=torch.uint8)

    def wait(self) -> None:
        """Nothing to wait for."""

    @property
    def free_bytes(self) -> int:
        """Memory that this process can still take without swapping, within the limit of its container."""
        return memory_limits.free_bytes()

    def __exit__(self, *error) -> None:
        """Nothing to give back."""


class Cuda(AbstractContextManager):
    """A CUDA GPU, by torch's name for it. Raises `UserError` if there is none, or without `numba-cuda` for the kernels.

    Copies have a stream of their own, so torch's current stream goes on meanwhile.
    """

    tier = "device"

    def __init__(self, name: str = "cuda"):
        if not torch.cuda.is_available():
            raise UserError(f"device {name!r} needs a CUDA GPU, and torch sees none; use device='cpu'")
        index = torch.device(name).index
        self.torch_device = torch.device("cuda", torch.cuda.current_device() if index is None else index)
        if self.torch_device.index >= (count := torch.cuda.device_count()):
            raise UserError(f"device {name!r}: torch sees {count} GPUs, the first of them cuda:0")
        if find_spec("numba_cuda") is None:
            raise UserError(f"device {name!r} needs numba-cuda: pip install -e '.[cuda]'")
        self._copies = torch.cuda.Stream(self.torch_device)
        self._pinned = ExitStack()

    @property
    def free_bytes(self) -> int:
        """Memory of the GPU that neither this process nor another one uses."""
        with torch.cuda.device(self.torch_device):
            torch.cuda.empty_cache()  # torch keeps the memory of deleted tensors
        return torch.cuda.mem_get_info(self.torch_device)[0]

    def empty(self, nbytes: int) -> UInt8[Tensor, " nbytes"]:
        """Uninitialised memory of the GPU that starts on a page. Raises `UserError` if there is too little."""
        with self.within_memory():
            whole = torch.empty(nbytes + BLOCK_BYTES, dtype=torch.uint8, device=self.torch_device)
        return whole[-whole.data_ptr() % BLOCK_BYTES :][:nbytes]

    @contextmanager
    def within_memory(self) -> Iterator[None]:
        """Raise a `UserError` when torch reports that the GPU's memory has run out."""
        try:
            yield
        except torch.OutOfMemoryError as error:
            raise UserError(
                f"{self.torch_device} ran out of memory, with {self.free_bytes / MB:.1f} MB free: set device_bytes "
                "lower, so that fewer layers stay there, or end what else uses the GPU"
            ) from error

    def pinned_buffer(self, nbytes: int) -> UInt8[np.ndarray, " nbytes"]:
        """Host memory that the GPU can read by itself: the huge pages that suit the disk, page-locked.

        torch's own pinned memory rounds each allocation up to a power of two. Raises `UserError` if the system does not
        allow so much locked memory.
        """
        buffer = aligned_buffer(nbytes)
        if nbytes:
            with torch.cuda.device(self.torch_device):
                error = int(torch.cuda.cudart().cudaHostRegister(buffer.ctypes.data, nbytes, PORTABLE))
            if error:
                raise UserError(f"{nbytes / MB:.1f} MB cannot be pinned (CUDA error {error}): set dram_bytes lower")
            self._pinned.callback(_unpin, buffer)
        return buffer

    def copy(self, source: UInt8[np.ndarray, " bytes"], target: UInt8[Tensor, " bytes"]) -> None:
        """Copy from DRAM and wait for the copy, but not for work that was launched before."""
        with torch.cuda.stream(self._copies):
            target.copy_(torch.from_numpy(source), non_blocking=True)
        self._copies.synchronize()

    def mark(self) -> torch.cuda.Event:
        """A mark behind the work launched so far. Its `synchronize()` waits for all work before it."""
        event = torch.cuda.Event(blocking=True)
        event.record(torch.cuda.current_stream(self.torch_device))
        return event

    def wait(self) -> None:
        """Wait for the work that was launched on torch's current stream."""
        torch.cuda.current_stream(self.torch_device).synchronize()

    def __exit__(self, *error) -> None:
        """Wait for all work, then unpin the memory."""
        torch.cuda.synchronize(self.torch_device)
        self._pinned.close()


def _unpin(buffer: np.ndarray) -> None:
    torch.cuda.cudart().cudaHostUnregister(buffer.ctypes.data)


def open_device(name: str) -> Cpu | Cuda:
    """The CPU ("cpu") or a GPU ("cuda", "cuda:1"). Raises `UserError` for another name, and what `Cuda` raises."""
    kind, _, index = name.partition(":")
    if name == "cpu":
        return Cpu()
    if kind == "cuda" and (index.isdecimal() or name == kind):
        return Cuda(name)
    raise UserError(f"unknown device {name!r}; expected 'cpu', 'cuda', or one of several GPUs as 'cuda:1'")

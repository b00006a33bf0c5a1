"""Where products are taken: the CPU, which reads weights in DRAM, or a GPU, into whose memory they are copied.

`Cuda` is all that the runtime asks of a GPU: memory, copies from pinned memory, and to wait for what was launched.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from typing import Self

import numpy as np
import psutil
import torch
from jaxtyping import UInt8
from torch import Tensor

from toolkit.errors import UserError
from toolkit.storage.buffers import aligned_buffer
from toolkit.storage.direct import BLOCK_BYTES

PORTABLE = 1  # cudaHostRegisterPortable: pinned for every context
MB = 1e6


class Cpu:
    """What it launches is done when the call returns."""

    tier, torch_device = "dram", torch.device("cpu")

    def empty(self, nbytes: int) -> UInt8[Tensor, " nbytes"]:
        """Memory, all of it touched."""
        return torch.zeros(nbytes, dtype=torch.uint8)

    def wait(self) -> None:
        """Nothing to wait for."""

    @property
    def free_bytes(self) -> int:
        """What programs can still have without swapping."""
        return psutil.virtual_memory().available

    @contextmanager
    def within_memory(self) -> Iterator[None]:
        """Nothing to add to what the system says."""
        yield

    def __enter__(self) -> Self:
        """Itself."""
        return self

    def __exit__(self, *error) -> None:
        """Nothing to give back."""


class Cuda:
    """A CUDA GPU by torch's name for it. Raises `UserError` if there is none, or no `numba-cuda` to run kernels with.

    Copies have a stream of their own, and torch's current one goes on meanwhile.
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
            raise UserError(f"device {name!r} needs numba-cuda: pip install 'sparse-offload-toolkit[cuda]'")
        self._copies = torch.cuda.Stream(self.torch_device)
        self._pinned = ExitStack()

    @property
    def free_bytes(self) -> int:
        """What is not in use of its memory, by this process or another."""
        with torch.cuda.device(self.torch_device):
            torch.cuda.empty_cache()  # what torch keeps of tensors that are gone
        return torch.cuda.mem_get_info(self.torch_device)[0]

    def empty(self, nbytes: int) -> UInt8[Tensor, " nbytes"]:
        """Memory of the GPU, whatever is in it, from a page's start. Raises `UserError` if it has too little."""
        with self.within_memory():
            whole = torch.empty(nbytes + BLOCK_BYTES, dtype=torch.uint8, device=self.torch_device)
        return whole[-whole.data_ptr() % BLOCK_BYTES :][:nbytes]

    @contextmanager
    def within_memory(self) -> Iterator[None]:
        """Turn what torch raises when the GPU's memory runs out into a `UserError`."""
        try:
            yield
        except torch.OutOfMemoryError as error:
            raise UserError(
                f"{self.torch_device} ran out of memory, with {self.free_bytes / MB:.1f} MB free: set device_bytes "
                "lower, so that fewer layers stay there, or end what else uses the GPU"
            ) from error

    def pinned_buffer(self, nbytes: int) -> UInt8[np.ndarray, " nbytes"]:
        """Host memory that the GPU reads by itself: huge pages as for the disk, page-locked by hand.

        torch's own pinned memory rounds each allocation up to a power of two. Raises `UserError` if the system lets no
        so much memory be locked.
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
        """Copy from DRAM and wait until it is there. What was launched before may still be running."""
        with torch.cuda.stream(self._copies):
            target.copy_(torch.from_numpy(source), non_blocking=True)
        self._copies.synchronize()

    def mark(self) -> torch.cuda.Event:
        """A point in the work that was launched so far; its `synchronize()` waits for all before it."""
        event = torch.cuda.Event(blocking=True)
        event.record(torch.cuda.current_stream(self.torch_device))
        return event

    def wait(self) -> None:
        """Wait for what was launched on torch's current stream."""
        torch.cuda.current_stream(self.torch_device).synchronize()

    def __enter__(self) -> Self:
        """Itself."""
        return self

    def __exit__(self, *error) -> None:
        """Let go of pinned memory, when nothing runs any more."""
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

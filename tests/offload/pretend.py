"""A GPU's part in the runtime, played by the CPU, which writes down what was asked of it."""

import threading
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from toolkit.storage.buffers import HUGE_PAGE_BYTES, aligned_buffer
from toolkit.storage.readers import Threads

GARBAGE = 0xA5  # what a GPU's memory holds before anything is copied there


@dataclass
class Mark:
    """The `work` launched before it, and whether somebody waited for that."""

    work: int
    waited: bool = False

    def synchronize(self) -> None:
        self.waited = True


@dataclass
class PretendGpu:
    """`toolkit.offload.device.Cuda` without a GPU: its memory is the host's, its work is done at once.

    `copies` holds, for each copy, its target's address, the pieces of work that were waited for before it (the most
    that some mark, which somebody waited for, was made after), and the thread.
    """

    memory_bytes: int = 1 << 30
    tier: str = "device"
    torch_device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    device_buffers: list[torch.Tensor] = field(default_factory=list)
    pinned: list = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    work: int = 0
    copies: list[tuple[int, int, int]] = field(default_factory=list)
    before_copy: object = None

    @property
    def free_bytes(self) -> int:
        return self.memory_bytes - sum(buffer.numel() for buffer in self.device_buffers)

    def empty(self, nbytes: int) -> torch.Tensor:
        buffer = torch.from_numpy(aligned_buffer(nbytes)).fill_(GARBAGE)
        self.device_buffers.append(buffer)
        return buffer

    def pinned_buffer(self, nbytes: int):
        self.pinned.append(aligned_buffer(nbytes))
        return self.pinned[-1]

    def copy(self, source, target) -> None:
        if self.before_copy:
            self.before_copy()
        waited = max((mark.work for mark in self.marks if mark.waited), default=0)
        self.copies.append((target.data_ptr(), waited, threading.get_ident()))
        target.copy_(torch.from_numpy(source))

    @contextmanager
    def within_memory(self):
        yield

    def mark(self) -> Mark:
        self.marks.append(Mark(self.work))
        return self.marks[-1]

    def wait(self) -> None:
        self.work += 1

    def __enter__(self):
        return self

    def __exit__(self, *error) -> None:
        pass


class DirectThreads(Threads):
    """Reads into the memory of the pretended GPU."""

    name, into = "direct", "device"

    def submit(self, ranges, target, within=None):
        return super().submit(ranges, target.numpy(), within)


def whole(nbytes: int) -> int:
    return -(-nbytes // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES

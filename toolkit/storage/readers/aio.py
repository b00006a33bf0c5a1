"""Linux's native asynchronous I/O: one thread keeps many chunks under way, in a compiled loop.

Threads must be woken for each call and take cores from products that run meanwhile. So this is quicker for thousands
of short reads, and beside products for long ones. It needs no package, and containers allow it. Reads are asynchronous
past the page cache only.
"""

import ctypes
import os
from collections.abc import Mapping
from contextlib import ExitStack
from threading import Thread

import numpy as np
from jaxtyping import Int64, UInt8

from toolkit.errors import UserError
from toolkit.storage.chunks import Chunks, is_end, read_one
from toolkit.storage.direct import StoredFile
from toolkit.storage.readers.base import HostReader, at_least_one

CHUNK_BYTES = 4 << 20
DEPTH = 64
NOT_STARTED = -1 << 62  # the result of a chunk whose read was not started


class Aio(HostReader):
    """One context with `depth` chunks under way. Raises `UserError` where the system refuses it."""

    name = "aio"

    def __init__(self, files: Mapping[str, StoredFile], chunk_bytes: int = CHUNK_BYTES, depth: int = DEPTH):
        self.depth = at_least_one("depth", depth)
        super().__init__(files, chunk_bytes)

    def _open(self, stack: ExitStack) -> str:
        from toolkit.kernels.reads import REQUEST_WORDS, read_many  # Numba takes a while to import

        self._context, none = _context(stack, self.depth), np.zeros(0, np.int64)
        requests = np.zeros((0, REQUEST_WORDS), np.int64)
        # compiled before a clock is started
        read_many(self._context, self.depth, -1, none, none, none, np.zeros(1, np.uint8), none, requests)
        return super()._open(stack)

    def _read_all(self, descriptor: int, chunks: Chunks, target: UInt8[np.ndarray, " bytes"]) -> None:
        while True:
            results = self._read_many(descriptor, chunks, target)
            ends = chunks.offsets + chunks.sizes
            again = np.flatnonzero(results != chunks.sizes)
            again = [at for at in again if not is_end(descriptor, chunks.offsets[at] + results[at], ends[at])]
            if not len(again):
                return
            chunks = chunks.at(again)
            offset, size, place = (int(numbers[0]) for numbers in (chunks.offsets, chunks.sizes, chunks.places))
            read_one(descriptor, offset, target[place : place + size])  # a signal cut it short, or this tells why
            chunks = chunks.at(slice(1, None))

    def _read_many(
        self, descriptor: int, chunks: Chunks, target: UInt8[np.ndarray, " bytes"]
    ) -> Int64[np.ndarray, " chunks"]:
        """Read chunks; the bytes read of each, below 0 if it failed, `NOT_STARTED` after a failure."""
        from toolkit.kernels.reads import REQUEST_WORDS, read_many

        numbers = map(np.ascontiguousarray, (chunks.offsets, chunks.sizes, chunks.places))
        results = np.full(len(chunks.sizes), NOT_STARTED)
        requests = np.zeros((len(results), REQUEST_WORDS), np.int64)
        read_many(self._context, self.depth, descriptor, *numbers, target, results, requests)
        return results


def _context(stack: ExitStack, depth: int) -> int:
    """A context of the kernel's, destroyed with the stack: by a thread, since the kernel takes 30 ms for it."""
    from toolkit.kernels.reads import DESTROY, SETUP

    library, context = ctypes.CDLL(None, use_errno=True), ctypes.c_ulong(0)
    if SETUP < 0 or library.syscall(SETUP, depth, ctypes.byref(context)) < 0:
        reason = os.strerror(ctypes.get_errno()) if SETUP >= 0 else "unknown processor"
        raise UserError(f"this system refuses asynchronous I/O ({reason}): use reader 'threads'")
    stack.callback(Thread(target=library.syscall, args=(DESTROY, context), daemon=True).start)
    return context.value

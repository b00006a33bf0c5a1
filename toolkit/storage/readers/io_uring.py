"""Linux's io_uring: one thread keeps many chunks under way. Needs the package `uring-api`, which brings liburing."""

from collections.abc import Mapping
from contextlib import ExitStack

import numpy as np
from jaxtyping import UInt8

from toolkit.errors import UserError
from toolkit.storage.direct import StoredFile
from toolkit.storage.preads import read_one
from toolkit.storage.readers.base import Chunks, HostReader, at_least_one

CHUNK_BYTES = 1 << 20
DEPTH = 8


class IoUring(HostReader):
    """One ring with `depth` chunks under way.

    Raises `UserError` if the package is not installed, or if the kernel or a container's filter refuses io_uring.
    """

    name = "io_uring"

    def __init__(self, files: Mapping[str, StoredFile], chunk_bytes: int = CHUNK_BYTES, depth: int = DEPTH):
        self.depth = at_least_one("depth", depth)
        super().__init__(files, chunk_bytes)

    def _open(self, stack: ExitStack) -> str:
        self._ring = stack.enter_context(_ring(self.depth))
        return super()._open(stack)

    def _fetch(self, descriptor: int, chunks: Chunks, target: UInt8[np.ndarray, " bytes"]) -> None:
        waiting = zip(chunks.offsets.tolist(), chunks.sizes.tolist(), chunks.places.tolist(), strict=True)
        failed, under_way = [], 0
        while True:
            while under_way < self.depth and (chunk := next(waiting, None)):
                self._start(descriptor, chunk, target)
                under_way += 1
            if not under_way:
                break
            self._ring.submit()
            completions = self._ring.wait() or []
            under_way -= len(completions)
            failed += [done.user_data for done in completions if done.res != done.user_data[1]]
        for offset, size, place in failed:  # read it again, or raise the reason
            read_one(descriptor, offset, target[place : place + size])

    def _start(self, descriptor: int, chunk: tuple[int, int, int], target: UInt8[np.ndarray, " bytes"]) -> None:
        offset, size, place = chunk
        part = memoryview(target)[place : place + size]
        self._ring.prepare(self._ring.construct_read(descriptor, part, offset, chunk))


def _ring(depth: int):
    try:
        import uring_api
    except ImportError as error:
        raise UserError(
            "reader 'io_uring' needs the package uring-api: pip install -e '.[io_uring]', or use reader 'threads'"
        ) from error
    try:
        return uring_api.Ring(depth)
    except (OSError, RuntimeError) as error:
        raise UserError(f"this kernel or container refuses io_uring ({error}): use reader 'threads'") from error

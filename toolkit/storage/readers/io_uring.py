"""Linux's io_uring: one thread keeps many chunks under way. Needs the package `uring-api`, which brings liburing."""

from collections.abc import Mapping
from contextlib import ExitStack

import numpy as np
from jaxtyping import Int64, UInt8

from toolkit.errors import UserError
from toolkit.storage.direct import StoredFile
from toolkit.storage.readers.asynchronous import NOT_STARTED, AsynchronousReader
from toolkit.storage.readers.base import Chunks, at_least_one

CHUNK_BYTES = 1 << 20
DEPTH = 8


class IoUring(AsynchronousReader):
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

    def _read_many(
        self, descriptor: int, chunks: Chunks, target: UInt8[np.ndarray, " bytes"]
    ) -> Int64[np.ndarray, " chunks"]:
        results, under_way, failed = np.full(len(chunks.sizes), NOT_STARTED), 0, False
        numbers = (chunks.offsets, chunks.sizes, chunks.places)
        waiting = zip(range(len(results)), *(each.tolist() for each in numbers), strict=True)
        while True:
            while under_way < self.depth and not failed and (chunk := next(waiting, None)):
                self._start(descriptor, chunk, target)
                under_way += 1
            if not under_way:
                return results
            self._ring.submit()
            completions = self._ring.wait() or []
            under_way -= len(completions)
            for done in completions:
                index, size = done.user_data
                results[index], failed = done.res, failed or done.res != size

    def _start(self, descriptor: int, chunk: tuple[int, int, int, int], target: UInt8[np.ndarray, " bytes"]) -> None:
        index, offset, size, place = chunk
        part = memoryview(target)[place : place + size]
        self._ring.prepare(self._ring.construct_read(descriptor, part, offset, (index, size)))


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

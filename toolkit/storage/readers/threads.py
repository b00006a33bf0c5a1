"""A pool of threads. Each waits for one chunk at a time, in a compiled loop without the interpreter's lock."""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack

import numpy as np
from jaxtyping import UInt8

from toolkit.storage.chunks import Chunks, read_ranges, warm_up
from toolkit.storage.direct import StoredFile
from toolkit.storage.readers.base import HostReader, at_least_one

CHUNK_BYTES = 1 << 20
DEPTH = 4


class Threads(HostReader):
    """Reads with `pread`. Each thread takes the next chunk that no other has taken. Needs no further package."""

    name = "threads"

    def __init__(self, files: Mapping[str, StoredFile], chunk_bytes: int = CHUNK_BYTES, depth: int = DEPTH):
        self.depth = at_least_one("depth", depth)
        super().__init__(files, chunk_bytes)

    def _open(self, stack: ExitStack) -> str:
        warm_up()
        self._pool = stack.enter_context(ThreadPoolExecutor(self.depth, "storage-pread"))
        return super()._open(stack)

    def _read_all(self, descriptor: int, chunks: Chunks, target: UInt8[np.ndarray, " bytes"]) -> None:
        arguments = (descriptor, chunks.offsets, chunks.sizes, chunks.places, target, np.zeros(1, np.int64))
        helpers = [self._pool.submit(read_ranges, *arguments) for _ in range(min(self.depth, len(chunks.sizes)) - 1)]
        try:
            read_ranges(*arguments)  # this thread is one of them
        finally:
            wait(helpers)
        for helper in helpers:
            helper.result()

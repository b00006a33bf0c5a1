"""Threads that each wait for one chunk at a time, in a compiled loop that holds no interpreter lock."""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack

import numpy as np

from toolkit.errors import UserError
from toolkit.storage.files import StoredFile, open_unchanged
from toolkit.storage.preads import read_ranges, warm_up
from toolkit.storage.readers.base import Chunks, Reader, common_mode

CHUNK_BYTES = 1 << 20
THREADS = 4


class Threads(Reader):
    """`pread` by a pool of threads; needs nothing but the system. `target` is a NumPy byte array."""

    name = "threads"

    def __init__(self, files: Mapping[str, StoredFile], chunk_bytes: int = CHUNK_BYTES, threads: int = THREADS):
        super().__init__(files, chunk_bytes)
        if threads < 1:
            raise UserError(f"{threads} threads: expected at least 1")
        warm_up()
        with ExitStack() as stack:
            self._open = {shard: stack.enter_context(open_unchanged(file)) for shard, file in files.items()}
            self._stack = stack.pop_all()
        self.mode = common_mode(file.mode for file in self._open.values())
        self._pool = ThreadPoolExecutor(threads, "storage-pread")
        self.threads = threads

    def close(self) -> None:
        """Finish what was started, drop what was not, and close the files."""
        super().close()
        self._pool.shutdown()
        self._stack.close()

    def _transfer(self, shard: str, chunks: Chunks, target: np.ndarray) -> None:
        taken = np.zeros(1, np.int64)
        arguments = (self._descriptor(shard), chunks.offsets, chunks.sizes, chunks.places, target, taken)
        work = [self._pool.submit(read_ranges, *arguments) for _ in range(min(self.threads, len(chunks.sizes)))]
        wait(work)  # for all, even if one fails: the target must be at rest when an error is told
        for done in work:
            done.result()

    def _descriptor(self, shard: str) -> int:
        return self._open[shard].descriptor

"""The base of asynchronous readers: one thread keeps many chunks under way, and failed reads are repeated."""

from abc import abstractmethod

import numpy as np
from jaxtyping import Int64, UInt8

from toolkit.storage.preads import read_one
from toolkit.storage.readers.base import Chunks, HostReader

NOT_STARTED = -1 << 62  # the result of a chunk whose read was not started


class AsynchronousReader(HostReader):
    """Reads chunks of a file all at once, `depth` of them under way, by the system's interface for that."""

    depth: int

    @abstractmethod
    def _read_many(
        self, descriptor: int, chunks: Chunks, target: UInt8[np.ndarray, " bytes"]
    ) -> Int64[np.ndarray, " chunks"]:
        """Read chunks; return of each how many bytes were read, below 0 if it failed, or `NOT_STARTED`.

        After a failure no more reads are started. No read is under way at the end.
        """

    def _fetch(self, descriptor: int, chunks: Chunks, target: UInt8[np.ndarray, " bytes"]) -> None:
        while True:
            results = self._read_many(descriptor, chunks, target)
            again = np.flatnonzero(results != chunks.sizes)
            if not len(again):
                return
            chunks = chunks.at(again)
            offset, size, place = (int(numbers[0]) for numbers in (chunks.offsets, chunks.sizes, chunks.places))
            read_one(descriptor, offset, target[place : place + size])  # a signal cut it short, or this tells why
            chunks = chunks.at(slice(1, None))

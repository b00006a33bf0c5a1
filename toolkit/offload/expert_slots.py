"""The experts of one layer that are in memory: each in a slot of its own, where the disk has put it (CORM, 4.3)."""

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager

import numpy as np
from jaxtyping import Int64, Shaped, UInt8
from torch import Tensor

from toolkit.offload.cache import Cache
from toolkit.policies.two_level import TwoLevel, TwoLevelChange
from toolkit.storage.readers.base import Reader
from toolkit.storage.runs import OpRun, views
from toolkit.timeline import Recorder


class ExpertSlots:
    """Reads experts into slots, whole, and says where they are. `cache` decides which experts stay, and counts.

    If a read fails, nothing is held any more.

    Args:
        cache: of the layer's experts.
        runs: each expert on disk.
        arena: a slot a row; each starts on a block and holds the largest expert.
        reader: of the files.
        recorder: takes a span for each read.
        layer: its number.
    """

    def __init__(
        self,
        cache: TwoLevel,
        runs: Sequence[OpRun],
        arena: UInt8[np.ndarray, "slots bytes"],
        reader: Reader,
        recorder: Recorder,
        layer: int,
    ):
        self.cache, self.runs = cache, runs
        self._arena, self._reader, self._recorder, self._layer = arena, reader, recorder, layer
        self._slots = Cache(len(arena), self._fetch)

    def bring(self, experts: Int64[np.ndarray, " needed"]) -> None:
        """Start to read the experts of this token that memory does not hold. Raises what `TwoLevel.step` raises."""
        self._read(self.cache.step(dict.fromkeys(experts.tolist())))

    def prefetch(self, experts: Int64[np.ndarray, " predicted"]) -> None:
        """Start to read experts that the next token of this layer is predicted to need, the likeliest first."""
        self._read(self.cache.admit(dict.fromkeys(experts.tolist())))

    def rows(self, expert: int) -> Shaped[Tensor, "rows width"]:
        """The stored rows of an expert, in place, once they have arrived; good until the next change.

        Raises what the read raises.
        """
        with self._all_or_nothing():
            slot = self._slots.need(expert)
        return views(self.runs[expert].pieces, self._arena[slot])["values"]

    def clear(self) -> None:
        """Wait for the reads under way, and hold nothing."""
        self._slots.clear()
        self.cache.clear()

    def _read(self, change: TwoLevelChange) -> None:
        for expert in change.evicted.tolist():
            self._slots.drop(expert)
        with self._all_or_nothing():
            for expert, slot in change.placed:
                self._slots.ahead(expert, slot)

    def _fetch(self, expert: int, slot: int) -> Future:
        run = self.runs[expert]
        span = self._recorder.span("read", "expert", "storage", run.nbytes, self._layer)
        return self._reader.submit(run.chunks, self._arena[slot], span)

    @contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        """Hold nothing if the block fails."""
        try:
            yield
        except BaseException:
            self.clear()
            raise

"""The experts of one layer that are in memory, while others are on their way from the disk (CORM, section 4.3)."""

from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from jaxtyping import UInt8

from toolkit.offload.cache import Cache
from toolkit.residency.two_level import TwoLevel, TwoLevelChange
from toolkit.timeline import Recorder

if TYPE_CHECKING:
    from toolkit.storage.chunks import Chunks
    from toolkit.storage.readers.base import Reader


class StoredExpert(Protocol):
    """An expert on disk: the reads that bring it into a slot, and its weights there."""

    nbytes: int

    @property
    def chunks(self) -> "Sequence[Chunks]":
        """The reads."""

    def view(self, buffer: Any) -> Any:
        """The weights, in place."""


class ExpertSlots(Cache):
    """The experts of one layer that are in memory: each in a slot of its own, where the disk has put it.

    `cache` decides which experts stay, and counts hits. `runs` are the stored experts by number. The rows of `arena`
    are the slots: each starts on a block and holds the largest expert. If a read fails, nothing is held any more.
    """

    def __init__(
        self,
        cache: TwoLevel,
        runs: Sequence[StoredExpert],
        arena: UInt8[np.ndarray, "slots bytes"],
        reader: "Reader",
        recorder: Recorder,
        layer: int,
    ):
        super().__init__(len(arena))
        self.cache, self.runs, self.layer = cache, runs, layer
        self._arena, self._reader, self._recorder = arena, reader, recorder
        self._stored: list[StoredExpert | None] = [None] * len(arena)
        self._views: list[tuple[int, Any] | None] = [None] * len(arena)

    def bring(self, experts: Iterable[int]) -> None:
        """Start to read the experts of this token that memory does not hold. Raises what `TwoLevel.step` raises."""
        self._change(self.cache.step(dict.fromkeys(experts)))

    def prefetch(self, experts: Iterable[int], protect: Sequence[int] = ()) -> None:
        """Start to read experts that are predicted to be needed next, the likeliest first; those of `protect` stay."""
        self._change(self.cache.admit(dict.fromkeys(experts), protect))

    def coming(self, expert: int) -> bool:
        """Whether an expert that was asked for is not there yet."""
        coming = self._coming[self.held.index(expert)]
        return coming is not None and not coming.done()

    def slot(self, expert: int) -> int:
        """The slot of an expert that was asked for, once it has arrived. Raises what the read raises."""
        try:
            return self.need(expert)
        except BaseException:
            self.clear()
            raise

    def weights(self, expert: int) -> Any:
        """The stored weights of an expert, in place, once they have arrived; good until the next change.

        Raises what the read raises.
        """
        slot = self.slot(expert)
        view = self._views[slot]
        if view is None or view[0] != expert:
            stored = self._stored[slot]
            assert stored is not None  # it was read
            view = self._views[slot] = expert, stored.view(self._arena[slot])
        return view[1]

    def clear(self) -> None:
        """Wait for the reads under way, and hold nothing."""
        super().clear()
        self.cache.clear()

    def _change(self, change: TwoLevelChange) -> None:
        for expert in change.evicted.tolist():
            self.drop(expert)
        try:
            for expert, slot in change.placed:
                self.ahead(expert, slot)
        except BaseException:
            self.clear()
            raise

    def _fetch(self, expert: int, slot: int) -> Future:
        self._stored[slot] = run = self.runs[expert]
        span = self._recorder.span("read", "expert", "storage", run.nbytes, self.layer)
        return self._reader.submit(run.chunks, self._arena[slot], span)

"""Brings the layers of a pass into DRAM in order, the next one while this one is used.

    with Streamer(Plan(layers, tiers, way), reader, budget, recorder) as streamer:
        for number in range(len(layers)):
            weights = streamer.layer(number)     # op -> Packed, good until the next call

Layers whose tier is DRAM are read once. Layers in storage are read each time, into one slot (`sequential`) or into two
in turn (`pipelined`). If there are no more of them than slots, they are read once, too.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import UInt8

from toolkit.offload.budget import Budget
from toolkit.offload.cache import Ring
from toolkit.offload.plan import Plan
from toolkit.storage.buffers import aligned_buffer, buffer_bytes
from toolkit.storage.readers import Reader
from toolkit.timeline import Recorder

if TYPE_CHECKING:
    from toolkit.formats import Packed

Bytes = UInt8[np.ndarray, "_"]


class Streamer(Ring):
    """Brings what the plan lists of each layer in DRAM and storage: all of its ops, or some.

    `allocate` makes its two buffers. Raises `UserError` if the budget is too small for the slots and the layers that
    stay.
    """

    def __init__(
        self,
        plan: Plan,
        reader: Reader,
        budget: Budget,
        recorder: Recorder,
        allocate: Callable[[int], Bytes] = aligned_buffer,
    ):
        self.layers, self.reader, self.recorder = plan.layers, reader, recorder
        resident, streamed = plan.numbers("dram"), plan.numbers("storage")
        self._streamed, count = set(streamed), min(plan.slots, len(streamed))
        slot_bytes = max((self.layers[number].nbytes for number in streamed), default=0)
        sizes = [self.layers[number].nbytes for number in resident]
        budget.take(layers=buffer_bytes(sum(sizes)), slots=buffer_bytes(count * slot_bytes))
        slots = _carved(allocate(count * slot_bytes), [slot_bytes] * count)
        self._buffers = [*slots, *_carved(allocate(sum(sizes)), sizes)]
        super().__init__(streamed, count, resident)

    def content(self, number: int) -> Bytes:
        """The stored bytes of a layer, in place, good as long as `layer` would be. Raises what `layer` raises."""
        return self._buffers[self.slot(number)][: self.layers[number].nbytes]

    def close(self) -> None:
        """Wait for the read that is under way, and release all layers."""
        super().close()
        self._buffers = []

    def _view(self, number: int, slot: int) -> Mapping[str, "Packed"]:
        return self.layers[number].view(self._buffers[slot])

    def _fetch(self, number: int, slot: int) -> Future:
        """Start a read. The timeline has no reads of layers that stay.

        The reader's thread takes the time of the others, so a read that waits for another is not counted twice.
        """
        layer, span = self.layers[number], None
        if number in self._streamed:
            span = self.recorder.span("read", "layer", "storage", layer.nbytes, number)
        return self.reader.submit(layer.chunks, self._buffers[slot], within=span)


def _carved(arena: Bytes, sizes: Sequence[int]) -> list[Bytes]:
    """Pieces of these sizes, one behind the other."""
    return [arena[end - size : end] for size, end in zip(sizes, accumulate(sizes), strict=True)]

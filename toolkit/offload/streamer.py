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
from typing import Self

import numpy as np
from jaxtyping import UInt8

from toolkit.formats import Packed
from toolkit.offload.budget import Budget
from toolkit.offload.cache import Ring
from toolkit.offload.plan import Plan
from toolkit.storage.buffers import aligned_buffer, buffer_bytes
from toolkit.storage.readers import Reader
from toolkit.timeline import Recorder

Bytes = UInt8[np.ndarray, "_"]


class Streamer:
    """Gives the packed weights of one layer after the other.

    Brings what the plan lists of each layer: all of its ops, or some. It brings the layers in DRAM and storage; those
    on the device are not its task. `allocate` makes its two buffers. Raises
    `UserError` if the budget is too small for the slots and the layers that stay.
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
        resident_bytes = sum(self.layers[number].nbytes for number in resident)
        budget.take(layers=buffer_bytes(resident_bytes), slots=buffer_bytes(count * slot_bytes))
        self._buffers = [
            *_carved(allocate(count * slot_bytes), [slot_bytes] * count),
            *_carved(allocate(resident_bytes), [self.layers[number].nbytes for number in resident]),
        ]
        self._views: dict[tuple[int, int], Mapping[str, Packed]] = {}
        self._ring = Ring(streamed, count, self._read, resident)

    def layer(self, number: int) -> Mapping[str, Packed]:
        """The weights of a layer by op, in place. The next call for another layer overwrites them.

        Raises what the reader raises; the layer can be asked for again then.
        """
        slot = self._ring.layer(number)
        if (number, slot) not in self._views:  # to make them takes as long as to read a small layer
            self._views[number, slot] = self.layers[number].view(self._buffers[slot])
        return self._views[number, slot]

    def content(self, number: int) -> Bytes:
        """The stored bytes of a layer, in place, good as long as `layer` would be. Raises what `layer` raises."""
        return self._buffers[self._ring.layer(number)][: self.layers[number].nbytes]

    def go_on(self) -> None:
        """Read ahead into the buffer of the layer in use, too, which is not needed any more."""
        self._ring.go_on()

    def close(self) -> None:
        """Wait for the read that is under way, and release all layers."""
        self._ring.clear()
        self._buffers, self._views = [], {}

    def __enter__(self) -> Self:
        """The streamer itself."""
        return self

    def __exit__(self, *error) -> None:
        """Close it."""
        self.close()

    def _read(self, number: int, slot: int) -> Future:
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

"""Brings the layers of a pass into DRAM in order, the next one while this one is used.

    with Streamer(Plan(layers, tiers, way), reader, budget, recorder) as streamer:
        for number in range(len(layers)):
            weights = streamer.layer(number)     # op -> Packed, good until the next call

Layers whose tier is DRAM are read once. Layers in storage are read each time, into one slot (`sequential`) or into two
in turn (`pipelined`). If there are no more of them than slots, they are read once, too.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Self

import numpy as np
from jaxtyping import UInt8

from toolkit.formats import Packed
from toolkit.offload.budget import Budget
from toolkit.offload.plan import Plan
from toolkit.offload.ring import Ring
from toolkit.storage.buffers import aligned_buffer, buffer_bytes
from toolkit.storage.readers import Reader
from toolkit.timeline.spans import Recorder

Bytes = UInt8[np.ndarray, "_"]


class Streamer:
    """Gives the packed weights of one layer after the other.

    Brings what the plan lists of each layer: the whole layer, some of its ops, or some rows of them. It brings the
    layers in DRAM and storage; those on the device are not its task. `allocate` makes its two buffers. Raises
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
        slot_bytes = max((self.layers[number].nbytes for number in streamed), default=0)
        count = min(plan.slots, len(streamed))
        resident_bytes = sum(self.layers[number].nbytes for number in resident)
        budget.take(layers=buffer_bytes(resident_bytes), slots=buffer_bytes(count * slot_bytes))
        self._resident = self._read_resident(resident, allocate(resident_bytes))
        self._views = {number: self._view(number, content) for number, content in self._resident.items()}
        arena = allocate(count * slot_bytes)
        slots = [arena[number * slot_bytes :][:slot_bytes] for number in range(count)]
        self._ring = Ring(streamed, slots, self._read, self._view)

    def layer(self, number: int) -> Mapping[str, Packed]:
        """The weights of a layer by op, in place. The next call for another layer overwrites them.

        Raises what the reader raises; the layer can be asked for again then.
        """
        return self._views[number] if number in self._views else self._ring.layer(number)

    def content(self, number: int) -> Bytes:
        """The stored bytes of a layer, in place, good as long as `layer` would be. Raises what `layer` raises."""
        if number in self._resident:
            return self._resident[number]
        return self._ring.content(number)[: self.layers[number].nbytes]

    def go_on(self) -> None:
        """Read ahead into the buffer of the layer in use, too, which is not needed any more."""
        self._ring.go_on()

    def close(self) -> None:
        """Wait for the read that is under way, and release all layers."""
        self._ring.close()
        self._resident, self._views = {}, {}

    def __enter__(self) -> Self:
        """The streamer itself."""
        return self

    def __exit__(self, *error) -> None:
        """Close it."""
        self.close()

    def _view(self, number: int, buffer: Bytes) -> Mapping[str, Packed]:
        return self.layers[number].view(buffer)

    def _read(self, number: int, buffer: Bytes) -> Future:
        """Start a read. The reader's thread takes its time, so a read that waits for another is not counted twice."""
        layer = self.layers[number]
        span = self.recorder.span("read", "layer", "storage", layer.nbytes, number)
        return self.reader.submit(layer.ranges, buffer, within=span)

    def _read_resident(self, numbers: Sequence[int], buffer: Bytes) -> dict[int, Bytes]:
        """Read layers into one buffer, one behind the other."""
        self.reader.read([found for number in numbers for found in self.layers[number].ranges], buffer)
        contents, end = {}, 0
        for number in numbers:
            contents[number] = buffer[end:][: self.layers[number].nbytes]
            end += self.layers[number].nbytes
        return contents

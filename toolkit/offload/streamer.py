"""Brings the layers of a store into DRAM in the order of a pass, the next one while this one is used.

    with Streamer(store, "endor", tiers, reader, "pipelined", budget, recorder) as streamer:
        for number in range(len(tiers)):
            weights = streamer.layer(number)     # op -> Packed, good until the next call

Layers whose tier is DRAM are read once; those in storage each time, into one slot (`sequential`) or two in turn
(`pipelined`), unless there are no more of them than slots.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Self

import numpy as np
from jaxtyping import UInt8

from toolkit.formats import Packed
from toolkit.offload.budget import Budget
from toolkit.offload.ring import Ring
from toolkit.policies.ways import POLICIES
from toolkit.storage.buffers import aligned_buffer, buffer_bytes
from toolkit.storage.readers import Reader
from toolkit.storage.store import Store
from toolkit.timeline.spans import Recorder, Span

Bytes = UInt8[np.ndarray, "_"]


class Streamer:
    """Gives the packed weights of one layer after the other.

    `tiers` says of each layer whether it stays in "dram" or comes from "storage" each time; layers of other tiers are
    not this one's business. `allocate` makes its two buffers. Raises `UserError` if the budget is too small for the
    slots and the layers that stay.
    """

    def __init__(
        self,
        store: Store,
        variant: str,
        tiers: Sequence[str],
        reader: Reader,
        policy: str,
        budget: Budget,
        recorder: Recorder,
        allocate: Callable[[int], Bytes] = aligned_buffer,
    ):
        self.store, self.variant, self.reader, self.recorder = store, variant, reader, recorder
        resident, streamed = ([n for n, found in enumerate(tiers) if found == tier] for tier in ("dram", "storage"))
        slot_bytes = max((store.layer(number, variant).nbytes for number in streamed), default=0)
        count = min(POLICIES[policy].slots, len(streamed))
        resident_bytes = sum(store.layer(number, variant).nbytes for number in resident)
        budget.take(layers=buffer_bytes(resident_bytes), slots=buffer_bytes(count * slot_bytes))
        self._read_until_s = 0.0
        self._resident = self._read_whole(resident, allocate(resident_bytes))
        self._views = {number: self._view(number, content) for number, content in self._resident.items()}
        arena = allocate(count * slot_bytes)
        slots = [arena[number * slot_bytes :][:slot_bytes] for number in range(count)]
        self._ring = Ring(streamed, slots, self._read, self._view)

    def layer(self, number: int) -> Mapping[str, Packed]:
        """The weights of a layer by op, in place: they change with the next call for another layer.

        Raises what the reader raises; the layer can be asked for again then.
        """
        return self._views[number] if number in self._views else self._ring.layer(number)

    def content(self, number: int) -> Bytes:
        """A layer's bytes as they are stored, in place, as long as `layer` would be good. Raises what it raises."""
        if number in self._resident:
            return self._resident[number]
        return self._ring.content(number)[: self.store.layer(number, self.variant).nbytes]

    def close(self) -> None:
        """Wait for the read that is under way, and let go of all layers."""
        self._ring.close()
        self._resident, self._views = {}, {}

    def __enter__(self) -> Self:
        """The streamer itself."""
        return self

    def __exit__(self, *error) -> None:
        """Close it."""
        self.close()

    def _view(self, number: int, buffer: Bytes) -> Mapping[str, Packed]:
        return self.store.layer(number, self.variant).view(buffer)

    def _read(self, number: int, buffer: Bytes) -> Future:
        layer, submitted_s = self.store.layer(number, self.variant), self.recorder.now_s()
        reading = self.reader.submit([layer], buffer)
        reading.add_done_callback(lambda done: self._record(done, number, layer.nbytes, submitted_s))
        return reading

    def _record(self, done: Future, number: int, nbytes: int, submitted_s: float) -> None:
        """Reads are done one after the other, so one that had to wait began when the one before ended."""
        if done.cancelled() or done.exception() is not None:
            return
        begun_s, self._read_until_s = max(submitted_s, self._read_until_s), self.recorder.now_s()
        self.recorder.add(Span("read", "layer", "storage", begun_s, self._read_until_s, nbytes, number))

    def _read_whole(self, numbers: Sequence[int], buffer: Bytes) -> dict[int, Bytes]:
        """Layers one after the other in one buffer, for good."""
        layers = [self.store.layer(number, self.variant) for number in numbers]
        self.reader.read(layers, buffer)
        ends = np.cumsum([layer.nbytes for layer in layers])
        return {
            number: buffer[end - layer.nbytes : end] for number, layer, end in zip(numbers, layers, ends, strict=True)
        }

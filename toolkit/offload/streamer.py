"""Brings the layers of a store into memory in the order of a pass, the next one while this one is used.

    with Streamer(store, "endor", tiers, reader, "pipelined", budget, recorder) as streamer:
        for number in range(len(tiers)):
            weights = streamer.layer(number)     # op -> Packed, good until the next call

Layers whose tier is DRAM are read once; the others each time, into one slot (`sequential`) or two in turn
(`pipelined`). After the last layer comes the first: the next token needs it.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Self

import numpy as np

from toolkit.formats import Packed
from toolkit.offload.budget import Budget
from toolkit.offload.timeline import Recorder, Span
from toolkit.storage.buffers import aligned_buffer, buffer_bytes
from toolkit.storage.readers import Reader
from toolkit.storage.store import Store

SLOTS = {"sequential": 1, "pipelined": 2}


@dataclass
class Slot:
    """A buffer, the layer whose bytes it gets or has (None: none to be relied on), and its read.

    `views` are what layers look like here: made once each, since that takes as long as a small layer's read.
    """

    buffer: np.ndarray
    number: int | None = None
    reading: Future | None = None
    views: dict[int, Mapping[str, Packed]] = field(default_factory=dict)


class Streamer:
    """Gives the packed weights of one layer after the other.

    `tiers` says of each layer whether it stays in "dram" or comes from "storage" each time. Raises `UserError`
    if the budget is too small for the slots and the layers that stay.
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
    ):
        self.store, self.variant, self.tiers = store, variant, tuple(tiers)
        self.reader, self.recorder = reader, recorder
        layers = {tier: [n for n, found in enumerate(tiers) if found == tier] for tier in ("dram", "storage")}
        slot_bytes = max((store.layer(number, variant).nbytes for number in layers["storage"]), default=0)
        count = min(SLOTS[policy], len(layers["storage"]))
        resident_bytes = sum(store.layer(number, variant).nbytes for number in layers["dram"])
        budget.take(layers=buffer_bytes(resident_bytes), slots=buffer_bytes(count * slot_bytes))
        self._read_until_s = 0.0
        self._resident = self._read_whole(layers["dram"], aligned_buffer(resident_bytes))
        arena = aligned_buffer(count * slot_bytes)
        self._slots = [Slot(arena[number * slot_bytes :][:slot_bytes]) for number in range(count)]
        self._following = dict(zip(layers["storage"], layers["storage"][1:] + layers["storage"][:1], strict=True))

    def layer(self, number: int) -> Mapping[str, Packed]:
        """The weights of a layer by op, in place: they change with the next call for another layer.

        Raises what the reader raises; the layer can be asked for again then.
        """
        if number in self._resident:
            return self._resident[number]
        slot = self._slot_for(number)
        if len(self._slots) > 1 and (following := self._following[number]) != number:
            # before waiting: the layer before this one is done with, and the disk need not pause between two reads
            self._start(next(other for other in self._slots if other is not slot), following)
        self._wait(slot)
        if number not in slot.views:
            slot.views[number] = self.store.layer(number, self.variant).view(slot.buffer)
        return slot.views[number]

    def close(self) -> None:
        """Wait for the read that is under way."""
        for slot in self._slots:
            if slot.reading is not None:
                with suppress(Exception):  # nobody wants this layer any more
                    slot.reading.result()

    def __enter__(self) -> Self:
        """The streamer itself."""
        return self

    def __exit__(self, *error) -> None:
        """Close it."""
        self.close()

    def _slot_for(self, number: int) -> Slot:
        """The slot that holds a layer, or that its read is begun for."""
        slot = next((slot for slot in self._slots if slot.number == number), None)
        if slot is None:
            slot = next((slot for slot in self._slots if slot.number is None), self._slots[0])
            self._start(slot, number)
        return slot

    def _wait(self, slot: Slot) -> None:
        """Until the slot's bytes are all there; a layer whose read failed is forgotten."""
        try:
            slot.reading.result()
        except BaseException:
            slot.number = None
            raise

    def _start(self, slot: Slot, number: int) -> None:
        """Start reading a layer into a slot, unless it is there or on its way."""
        if slot.number == number:
            return
        if slot.reading is not None:
            with suppress(Exception):  # of another layer, which is not asked for: out of turn
                slot.reading.result()
        layer, slot.number, submitted_s = self.store.layer(number, self.variant), number, self.recorder.now_s()
        slot.reading = self.reader.submit([layer], slot.buffer)
        slot.reading.add_done_callback(lambda _: self._record(number, layer.nbytes, submitted_s))

    def _record(self, number: int, nbytes: int, submitted_s: float) -> None:
        """Reads are done one after the other, so one that had to wait began when the one before ended."""
        begun_s, self._read_until_s = max(submitted_s, self._read_until_s), self.recorder.now_s()
        self.recorder.add(Span("read", "layer", "storage", begun_s, self._read_until_s, nbytes, number))

    def _read_whole(self, numbers: Sequence[int], buffer: np.ndarray) -> dict[int, Mapping[str, Packed]]:
        """Layers one after the other in one buffer, for good."""
        layers = {number: self.store.layer(number, self.variant) for number in numbers}
        self.reader.read([*layers.values()], buffer)
        ends = np.cumsum([0, *(layer.nbytes for layer in layers.values())])
        return {number: layers[number].view(buffer[end:]) for number, end in zip(layers, ends, strict=False)}

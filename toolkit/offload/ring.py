"""Slots that layers pass through in turn, the next one fetched while this one is used."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from toolkit.formats import Packed

Buffer = TypeVar("Buffer")


@dataclass
class Slot(Generic[Buffer]):
    """A buffer, the layer whose bytes it gets or has (None: none to be relied on), and what brings them.

    `views` are what layers look like here: made once each, since that takes as long as a small layer's read.
    """

    buffer: Buffer
    number: int | None = None
    coming: Future | None = None
    views: dict[int, Mapping[str, Packed]] = field(default_factory=dict)


class Ring(Generic[Buffer]):
    """Layers `numbers`, over and over in this order: after the last comes the first, for the next token.

    If there is a slot for each of them, they are fetched once and stay.

    `fetch(number, buffer)` starts to bring a layer's bytes; `view(number, buffer)` makes weights of them. A layer asked
    for out of turn is brought, too, only later.
    """

    def __init__(
        self,
        numbers: Sequence[int],
        buffers: Sequence[Buffer],
        fetch: Callable[[int, Buffer], Future],
        view: Callable[[int, Buffer], Mapping[str, Packed]],
    ):
        self._slots = [Slot(buffer) for buffer in buffers]
        self._following = dict(zip(numbers, [*numbers[1:], *numbers[:1]], strict=True))
        self._fetch, self._view = fetch, view

    def layer(self, number: int) -> Mapping[str, Packed]:
        """A layer's weights, in place; they are good until the next call. Raises what `fetch` and its future do."""
        slot = self._arrived(number)
        if number not in slot.views:
            slot.views[number] = self._view(number, slot.buffer)
        return slot.views[number]

    def content(self, number: int) -> Buffer:
        """The buffer that holds a layer, until the next call. Raises what `layer` does."""
        return self._arrived(number).buffer

    def close(self) -> None:
        """Wait for what is on its way, and let go of the buffers."""
        for slot in self._slots:
            if slot.coming is not None:
                with suppress(Exception):  # nobody wants this layer any more
                    slot.coming.result()
        self._slots = []

    def _arrived(self, number: int) -> Slot:
        slot = self._slot_for(number)
        if len(self._slots) > 1 and (following := self._following[number]) != number:
            # before waiting: the layer before this one is done with, and the disk need not pause between two reads
            self._start(next(other for other in self._slots if other is not slot), following)
        self._wait(slot)
        return slot

    def _slot_for(self, number: int) -> Slot:
        """The slot that holds a layer, or that it is being fetched into."""
        slot = next((slot for slot in self._slots if slot.number == number), None)
        if slot is None:
            slot = next((slot for slot in self._slots if slot.number is None), self._slots[0])
            self._start(slot, number)
        return slot

    def _wait(self, slot: Slot) -> None:
        """Until the slot's bytes are all there; a layer that did not arrive is forgotten."""
        try:
            slot.coming.result()
        except BaseException:
            slot.number = None
            raise

    def _start(self, slot: Slot, number: int) -> None:
        """Start to fetch a layer into a slot, unless it is there or on its way."""
        if slot.number == number:
            return
        if slot.coming is not None:
            with suppress(Exception):  # of another layer, which is not asked for: out of turn
                slot.coming.result()
        slot.number = None  # should the next line raise
        slot.coming = self._fetch(number, slot.buffer)
        slot.number = number

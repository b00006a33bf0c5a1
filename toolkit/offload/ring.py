"""Slots that layers pass through in turn: the next layer is fetched while this one is used."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from toolkit.formats import Packed

Buffer = TypeVar("Buffer")


@dataclass
class Slot(Generic[Buffer]):
    """A buffer, the number of the layer that is in it or on its way, and the future of that fetch.

    `number` is None if the contents are undefined. `views` keep the weights of each layer in this buffer: making them
    takes as long as reading a small layer, so it is done once.
    """

    buffer: Buffer
    number: int | None = None
    coming: Future | None = None
    views: dict[int, Mapping[str, Packed]] = field(default_factory=dict)


class Ring(Generic[Buffer]):
    """The layers `numbers`, again and again in this order: the first follows the last, for the next token.

    If there is a slot for each layer, every layer is fetched once and stays.

    `fetch(number, buffer)` starts to bring the bytes of a layer. `view(number, buffer)` makes weights of them. A layer
    that is asked for out of order is brought as well, but nothing was fetched ahead for it.
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
        self._fetch, self._view, self._used = fetch, view, None

    def layer(self, number: int) -> Mapping[str, Packed]:
        """The weights of a layer, in place, good until the next call. Raises what `fetch` and its future raise."""
        slot = self._arrived(number)
        if number not in slot.views:
            slot.views[number] = self._view(number, slot.buffer)
        return slot.views[number]

    def content(self, number: int) -> Buffer:
        """The buffer that holds a layer, good until the next call. Raises what `layer` raises."""
        return self._arrived(number).buffer

    def go_on(self) -> None:
        """Say that the layer in use is not needed any more, so that its slot takes part in fetching ahead."""
        used, self._used = self._used, None
        if len(self._slots) > 1 and used is not None and used.number is not None:
            self._start(used, self._following[self._following[used.number]])

    def close(self) -> None:
        """Wait for the layers that are on their way, and release the buffers."""
        for slot in self._slots:
            if slot.coming is not None:
                with suppress(Exception):  # this layer is not needed any more
                    slot.coming.result()
        self._slots, self._used = [], None

    def _arrived(self, number: int) -> Slot:
        slot = self._slot_for(number)
        if len(self._slots) > 1 and (following := self._following[number]) != number:
            # start this before waiting: its slot is free, and the disk does not pause between two reads
            self._start(next(other for other in self._slots if other is not slot), following)
        self._wait(slot)
        self._used = slot
        return slot

    def _slot_for(self, number: int) -> Slot:
        """The slot that holds a layer or that the layer is being fetched into."""
        slot = next((slot for slot in self._slots if slot.number == number), None)
        if slot is None:
            slot = next((slot for slot in self._slots if slot.number is None), self._slots[0])
            self._start(slot, number)
        return slot

    def _wait(self, slot: Slot) -> None:
        """Wait until all bytes of the slot are there. A layer that failed to arrive is forgotten."""
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
            with suppress(Exception):  # it brings a layer that was not asked for
                slot.coming.result()
        slot.number = None  # the next line may raise
        slot.coming = self._fetch(number, slot.buffer)
        slot.number = number

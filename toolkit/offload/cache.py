"""Slots of memory that pieces of a model pass through: layers in turn, or experts as tokens need them."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from toolkit.formats import Packed


class Cache:
    """Slots and the pieces in them. `held`, by slot: the piece that it has, or will have after its fetch; else None.

    Fetches run one at a time, in the order in which they were started. So a slot is overwritten only after the earlier
    fetch into it has ended.
    """

    def __init__(self, slots: int):
        self.held: list[int | None] = [None] * slots
        self._coming: list[Future | None] = [None] * slots

    @abstractmethod
    def _fetch(self, piece: int, slot: int) -> Future:
        """Start to bring a piece into a slot."""

    def ahead(self, piece: int, slot: int) -> None:
        """Start to bring a piece into a slot, unless it is there or on its way. Raises what `_fetch` raises."""
        if self.held[slot] != piece:
            self.held[slot] = None  # the next line may raise
            self._coming[slot] = self._fetch(piece, slot)
            self.held[slot] = piece

    def need(self, piece: int) -> int:
        """The slot of a piece that was asked for ahead, once it has arrived.

        Raises the errors of its fetch; the slot is empty then.
        """
        slot = self.held.index(piece)
        if (coming := self._coming[slot]) is not None:
            try:
                coming.result()
            except BaseException:
                self.held[slot] = None
                raise
            self._coming[slot] = None
        return slot

    def drop(self, piece: int) -> None:
        """Give up a piece that is held or on its way."""
        self.held[self.held.index(piece)] = None

    def clear(self) -> None:
        """Wait for the fetches under way, and hold nothing."""
        for coming in filter(None, self._coming):
            with suppress(Exception):  # its piece is not needed any more
                coming.result()
        self.held, self._coming = [None] * len(self.held), [None] * len(self.held)


class Ring(Cache, AbstractContextManager):
    """The layers `numbers`, again and again in this order: the first follows the last, for the next token.

    They pass through the first `slots` slots. If there is one for each layer, every layer is fetched once and stays. A
    layer that is asked for out of order is fetched, too, but not ahead of its use. The layers `staying` are fetched at
    once, each into a slot of its own behind the others. Raises the errors of their fetches.
    """

    def __init__(self, numbers: Sequence[int], slots: int, staying: Sequence[int] = ()):
        super().__init__(slots + len(staying))
        self._slot_count, self._used = slots, None
        self._following = dict(zip(numbers, [*numbers[1:], *numbers[:1]], strict=True))
        self._views: dict[tuple[int, int], Mapping[str, "Packed"]] = {}
        for slot, number in enumerate(staying, slots):
            self.ahead(number, slot)
        for number in staying:
            self.need(number)

    @abstractmethod
    def _view(self, number: int, slot: int) -> Mapping[str, "Packed"]:
        """The weights of a layer by op, in place in a slot."""

    def layer(self, number: int) -> Mapping[str, "Packed"]:
        """The weights of a layer by op, in place. The next call for another layer overwrites them.

        Raises what its fetch raises; the layer can be asked for again then.
        """
        slot = self.slot(number)
        if (number, slot) not in self._views:  # to make them takes as long as to read a small layer
            self._views[number, slot] = self._view(number, slot)
        return self._views[number, slot]

    def slot(self, number: int) -> int:
        """The slot of a layer, which it keeps until the next call. Raises what its fetch raises."""
        if number in self._following:
            passing = self.held[: self._slot_count]
            slot = next((at for wanted in (number, None) for at, has in enumerate(passing) if has == wanted), 0)
            self.ahead(number, slot)
            if len(passing) > 1 and (following := self._following[number]) != number:
                # start this before waiting: its slot is free, and the disk does not pause between two reads
                self.ahead(following, 1 - slot)
            self._used = slot
        else:
            self.go_on()
        return self.need(number)

    def go_on(self) -> None:
        """Mark the layer in use as no longer needed, so that its slot can be fetched into."""
        slot, self._used = self._used, None
        if self._slot_count > 1 and slot is not None and (number := self.held[slot]) is not None:
            self.ahead(self._following[self._following[number]], slot)

    def close(self) -> None:
        """Wait for the fetches under way, and release all layers."""
        self.clear()
        self._views = {}

    def __exit__(self, *error) -> None:
        """Close it."""
        self.close()

"""A key-value cache with room behind its last position, so that a step writes a token in place.

transformers' own cache is copied whole for each token. Its layers are replaced one by one when a single token comes,
and stay what transformers expects: `keys` and `values` are views of the positions that hold something.
"""

from typing import Self

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from toolkit.offload.overhead import ROOM

OF_ROOM = {"room", "first", "written", "addresses", "left"}  # attributes of a layer


class GrowingLayer(DynamicLayer):
    """The keys and values of one layer, for one sequence. Both have the same shape and type.

    The next `reserve` notices if somebody has replaced, lengthened, shortened or moved `keys` and `values`. A copy of
    the layer (also a pickled one) has a room of its own. A position of the room is written once: whoever holds views
    of earlier keys and values finds them as they were, also after the layer was cut, as tensors of transformers are.
    """

    room: Tensor | None = None  # [2, 1, key heads, positions, size]: keys, then values
    first: int = 0  # where the positions that `keys` and `values` hold begin in the room
    written: int = 0  # where those begin that were never written
    addresses: tuple[int, int] | None = None  # of both halves of the room
    left: tuple[Tensor, Tensor, int, int] | None = None  # `keys`, `values` and their addresses after the last `reserve`

    @classmethod
    def of(cls, layer: DynamicLayer) -> Self:
        """The same contents as those of a layer that holds something."""
        made = cls.__new__(cls)
        made.__dict__.update(layer.__dict__)
        return made

    def __getstate__(self) -> dict[str, object]:
        """All but the room: `copy` and `pickle` would make separate arrays of its tensors and of their bits."""
        return {name: value for name, value in self.__dict__.items() if name not in OF_ROOM}

    def reserve(self) -> tuple[tuple[int, int, int], tuple[int, int]]:
        """Make the cache one position longer; whoever called writes its key and value.

        Returns the addresses of keys and values and the number of positions that the room has; then where those that
        the new position attends to begin and end.
        """
        length = self.keys.shape[-2]
        if not self._continues(length):
            self.room, self.first = _with_room(self.keys, self.values, length), 0
            self.addresses = self.room[0].data_ptr(), self.room[1].data_ptr()
        start, end = self.first, self.first + length + 1
        self.first, self.written = self._kept_from(start, end), end
        self.keys, self.values = self.room[:, :, :, self.first : end].unbind(0)
        self.left = self.keys, self.values, self.keys.data_ptr(), self.values.data_ptr()
        return (*self.addresses, self.room.shape[-2]), (start, end)

    def _kept_from(self, start: int, end: int) -> int:
        """The first position that the next token attends to."""
        return start

    def _continues(self, length: int) -> bool:
        """Whether `keys` and `values` lie in the room from `first` on, and the position behind them is free."""
        return (
            self.room is not None
            and self.first + length == self.written < self.room.shape[-2]
            and (self._as_left() or self._in_room())
        )

    def _as_left(self) -> bool:
        keys, values, at_keys, at_values = self.left
        same = self.keys is keys and self.values is values
        return same and keys.data_ptr() == at_keys and values.data_ptr() == at_values

    def _in_room(self) -> bool:
        if self.room.data_ptr() != self.addresses[0]:  # shared memory is elsewhere
            return False
        return all(
            now.data_ptr() == room.data_ptr() and now.stride() == room.stride() and now.shape[:2] == room.shape[:2]
            for now, room in zip((self.keys, self.values), self.room[:, :, :, self.first :], strict=True)
        )


class GrowingWindow(GrowingLayer, DynamicSlidingWindowLayer):
    """The keys and values of a layer with sliding attention: those of one position less than its window."""

    def _kept_from(self, start: int, end: int) -> int:
        self.cumulative_length += 1
        return max(start, end - self.sliding_window + 1)


GROWING: dict[type, type[GrowingLayer]] = {DynamicLayer: GrowingLayer, DynamicSlidingWindowLayer: GrowingWindow}


def _with_room(keys: Tensor, values: Tensor, length: int) -> Tensor:
    with torch.inference_mode(False):  # else nothing outside of that mode could write to it
        room = torch.empty(2, *keys.shape[:2], length + ROOM, keys.shape[3], dtype=keys.dtype)
    room[0, :, :, :length], room[1, :, :, :length] = keys, values
    return room

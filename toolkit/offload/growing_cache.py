"""A key-value cache with room behind its last position, so that a token is written in place.

transformers' own cache is copied whole for each token. Its layers are replaced one by one when a single token comes,
and stay what transformers expects: `keys` and `values` are views of the positions that hold something.
"""

from typing import Self

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer

ROOM = 256  # positions at least


class GrowingLayer(DynamicLayer):
    """The keys and values of one layer, for one sequence.

    Whatever transformers does to `keys` and `values` (longer, shorter, other ones) is noticed at the next `append`.
    """

    room: tuple[Tensor, Tensor] | None = None  # [1, key heads, positions, size] of keys and of values

    @classmethod
    def of(cls, layer: DynamicLayer) -> Self:
        """The same contents as those of a layer that holds something."""
        made = cls()
        made.__dict__.update(layer.__dict__)
        return made

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, int]:
        """Write one more position, [key heads, size], and return keys and values with their room, and the length."""
        length = self.keys.shape[-2]
        if self.room is None or length == self.room[0].shape[-2] or not self._in_room(length):
            self.room = tuple(_with_room(held, length) for held in (self.keys, self.values))
        keys, values = self.room
        keys[0, :, length], values[0, :, length] = key, value
        self.keys, self.values = keys[:, :, : length + 1], values[:, :, : length + 1]
        return keys[0], values[0], length + 1

    def _in_room(self, length: int) -> bool:
        """Whether `keys` and `values` still are the first positions of the room."""
        held = zip((self.keys, self.values), self.room, strict=True)
        return all(
            now.data_ptr() == room.data_ptr() and now.stride() == room.stride() and now.shape[:2] == room.shape[:2]
            for now, room in held
        )


def _with_room(held: Tensor, length: int) -> Tensor:
    room = torch.empty(*held.shape[:2], max(ROOM, 2 * length), held.shape[3], dtype=held.dtype)
    room[:, :, :length] = held
    return room

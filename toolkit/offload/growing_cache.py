"""A key-value cache with room behind its last position, so that a token is written in place.

transformers' own cache is copied whole for each token. Its layers are replaced one by one when a single token comes,
and stay what transformers expects: `keys` and `values` are views of the positions that hold something.
"""

from typing import Self

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from toolkit.kernels.single_token import bits

ROOM = 256  # positions: so often is the cache copied, and so much memory waits


class GrowingLayer(DynamicLayer):
    """The keys and values of one layer, for one sequence. Both have the same shape and type.

    The next `append` notices if transformers has replaced, lengthened or shortened `keys` and `values`.
    """

    room: Tensor | None = None  # [2, 1, key heads, positions, size]: keys, then values
    first: int = 0  # where the positions that `keys` and `values` hold begin in the room
    stored: tuple[np.ndarray, np.ndarray] | None = None  # the bits of both, as `attend` takes them
    left: tuple[Tensor, Tensor] | None = None  # `keys` and `values` as the last `append` left them

    @classmethod
    def of(cls, layer: DynamicLayer) -> Self:
        """The same contents as those of a layer that holds something."""
        made = cls.__new__(cls)
        made.__dict__.update(layer.__dict__)
        return made

    def append(self, pair: Tensor) -> tuple[int, int]:
        """Write the key and the value of one more position, [2, key heads, size].

        Returns where the positions that it attends to begin and end in the room.
        """
        length = self.keys.shape[-2]
        if self.room is None or self.first + length == self.room.shape[-2] or not self._in_room():
            self.room, self.first = _with_room(self.keys, self.values, length), 0
            self.stored = tuple(bits(each[0]) for each in self.room)
        start, end = self.first, self.first + length + 1
        self.room[:, 0, :, end - 1] = pair
        self.first = self._kept_from(start, end)
        self.left = self.keys, self.values = self.room[:, :, :, self.first : end].unbind(0)
        return start, end

    def _kept_from(self, start: int, end: int) -> int:
        """The first position that the next token attends to."""
        return start

    def _in_room(self) -> bool:
        """Whether `keys` and `values` still lie in the room from `first` on."""
        if self.left is not None and self.keys is self.left[0] and self.values is self.left[1]:
            return True
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
    room = torch.empty(2, *keys.shape[:2], length + ROOM, keys.shape[3], dtype=keys.dtype)
    room[0, :, :, :length], room[1, :, :, :length] = keys, values
    return room

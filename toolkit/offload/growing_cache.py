"""A key-value cache with room behind its last position, so that a token is written in place.

transformers' own cache is copied whole for each token. Its layers are replaced one by one when a single token comes,
and stay what transformers expects: `keys` and `values` are views of the positions that hold something.
"""

from typing import Self

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer

from toolkit.kernels.single_token import bits

ROOM = 256  # positions: so often is the cache copied, and so much memory waits


class GrowingLayer(DynamicLayer):
    """The keys and values of one layer, for one sequence. Both have the same shape and type.

    Whatever transformers does to `keys` and `values` (longer, shorter, other ones) is noticed at the next `append`.
    """

    room: Tensor | None = None  # [2, 1, key heads, positions, size]: keys, then values
    stored: tuple[np.ndarray, np.ndarray] | None = None  # the bits of both, as `attend_stored` takes them
    left: tuple[Tensor, Tensor] | None = None  # `keys` and `values` as the last `append` left them

    @classmethod
    def of(cls, layer: DynamicLayer) -> Self:
        """The same contents as those of a layer that holds something."""
        made = cls()
        made.__dict__.update(layer.__dict__)
        return made

    def append(self, pair: Tensor) -> int:
        """Write the key and the value of one more position, [2, key heads, size], and return the new length."""
        length = self.keys.shape[-2]
        if self.room is None or length == self.room.shape[-2] or not self._in_room():
            self.room = _with_room(self.keys, self.values, length)
            self.stored = tuple(bits(each[0]) for each in self.room)
        self.room[:, 0, :, length] = pair
        self.left = self.keys, self.values = self.room[:, :, :, : length + 1].unbind(0)
        return length + 1

    def _in_room(self) -> bool:
        """Whether `keys` and `values` still are the first positions of the room."""
        if self.left is not None and self.keys is self.left[0] and self.values is self.left[1]:
            return True
        return all(
            now.data_ptr() == room.data_ptr() and now.stride() == room.stride() and now.shape[:2] == room.shape[:2]
            for now, room in zip((self.keys, self.values), self.room, strict=True)
        )


def _with_room(keys: Tensor, values: Tensor, length: int) -> Tensor:
    room = torch.empty(2, *keys.shape[:2], length + ROOM, keys.shape[3], dtype=keys.dtype)
    room[0, :, :, :length], room[1, :, :, :length] = keys, values
    return room

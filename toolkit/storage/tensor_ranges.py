"""Tensors that lie in a file at any byte, and the reads of whole blocks that bring some of them together.

    layer = FileLayer.of({"self_attn.q_proj": op, ...})
    reader.read(layer.chunks, buffer)
    weights = layer.view(buffer)     # op -> what the op makes of its bytes, in place

A direct read needs offsets that are whole blocks of 4096 bytes; tensors of a GGUF file lie at multiples of 32. So reads
are rounded outwards, and tensors that lie next to each other are one read.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, groupby
from typing import Any, Protocol, Self

import numpy as np

from toolkit.storage.chunks import Chunks
from toolkit.storage.direct import BLOCK_BYTES, whole_blocks

GAP_BYTES = 64 << 10  # between two tensors that one read brings: it takes less time than another read


@dataclass(frozen=True)
class TensorRange:
    """A matrix of GGUF blocks: `nbytes` bytes from any `offset` of a file, with its type, such as "Q4_K"."""

    file: str
    offset: int
    nbytes: int
    kind: str
    shape: tuple[int, int]

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return self.nbytes // self.shape[0]

    def rows(self, first: int, count: int) -> Self:
        """Some rows of it."""
        begin = self.offset + first * self.row_bytes
        return type(self)(self.file, begin, count * self.row_bytes, self.kind, (count, self.shape[1]))


class RangedWeight(Protocol):
    """A linear whose rows are those of one range or of several, such as a `toolkit.storage.file_ops.FileOp`."""

    parts: tuple[TensorRange, ...]
    dense_bytes: int
    scratch_bytes: int

    def view(self, data: Callable[[TensorRange], Any]) -> Any:
        """The weight, in place: `data` gives the bytes from the first one of a range on."""


@dataclass(frozen=True)
class FileLayer:
    """Ops that are read together. `places` says where in the buffer each range begins."""

    ops: Mapping[str, RangedWeight]
    chunks: Sequence[Chunks]
    nbytes: int
    places: Mapping[TensorRange, int]

    @classmethod
    def of(cls, ops: Mapping[str, RangedWeight]) -> Self:
        """The layer of these ops."""
        ranges = sorted({part for op in ops.values() for part in op.parts}, key=lambda part: (part.file, part.offset))
        chunks, places, end = [], {}, 0
        for file, members in groupby(ranges, key=lambda part: part.file):
            spans = list(_spans(members))
            firsts = np.array([first for first, _, _ in spans])
            sizes = np.array([last - first for first, last, _ in spans])
            starts = np.array([*accumulate(sizes[:-1].tolist(), initial=end)])
            chunks.append(Chunks(file, firsts, sizes, starts))
            for (first, _, inside), start in zip(spans, starts.tolist(), strict=True):
                places |= {part: start + part.offset - first for part in inside}
            end += int(sizes.sum())
        return cls(ops, chunks, end, places)

    def view(self, buffer: Any) -> dict[str, Any]:
        """The weight of each op, in place: `buffer` holds what was read."""
        return {name: op.view(lambda part: buffer[self.places[part] :]) for name, op in self.ops.items()}

    @property
    def dense_bytes(self) -> int:
        """Bytes of the largest weight when dense."""
        return max(op.dense_bytes for op in self.ops.values())

    @property
    def scratch_bytes(self) -> int:
        """Bytes in which prompts make any of them dense."""
        return max(op.scratch_bytes for op in self.ops.values())

    @cached_property
    def shard(self) -> str:
        """The file of the first op."""
        return self.chunks[0].shard


def _spans(ranges: Iterable[TensorRange]) -> Iterable[tuple[int, int, list[TensorRange]]]:
    """Whole blocks, first and last byte, that hold ranges of one file, which come in order."""
    first, last, inside = 0, -1, []
    for part in ranges:
        begin = part.offset // BLOCK_BYTES * BLOCK_BYTES
        if inside and begin - last > GAP_BYTES:
            yield first, last, inside
            inside = []
        first, last = begin if not inside else first, whole_blocks(part.offset + part.nbytes)
        inside.append(part)
    if inside:
        yield first, last, inside

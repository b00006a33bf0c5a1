"""The parts of a store, and how the bytes that were read of them become tensors again.

Everything that can be read has `ranges` (the blocks that a reader fetches), `nbytes` (the size of the buffer that they
fill) and `view` (the weights in that buffer). A whole layer is one range. Parts of a layer are made like this:

    layer.only("fc1", "fc2")                                 # some ops of a layer
    Part({"fc1": layer.ops["fc1"].rows(128, 256)})           # some rows of an op; other ops could stand beside it
    Part({"fc1": run.rows(128, 256, index)})                 # a format whose `row_index` was read before
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

import numpy as np
import torch
from jaxtyping import UInt8
from torch import Tensor

from toolkit.errors import UserError, unknown
from toolkit.formats import READABLE, FormatError, Packed
from toolkit.formats.dense import Dense
from toolkit.formats.scaled import SCALES, with_extras
from toolkit.records import line
from toolkit.storage.direct import BLOCK_BYTES
from toolkit.storage.shards import Piece, layout

Buffer = UInt8[np.ndarray, " bytes"] | UInt8[Tensor, " bytes"]


@dataclass(frozen=True)
class Range:
    """The bytes of a shard from `start` up to, not including, `stop`, and the whole blocks around them.

    Readers fetch `nbytes` bytes from `offset`, since direct reads are of whole blocks.
    """

    shard: str
    start: int
    stop: int

    @property
    def offset(self) -> int:
        """The first byte of the first block."""
        return self.start // BLOCK_BYTES * BLOCK_BYTES

    @property
    def nbytes(self) -> int:
        """The bytes of all blocks."""
        return -(-self.stop // BLOCK_BYTES) * BLOCK_BYTES - self.offset if self.stop > self.start else 0


@dataclass(frozen=True)
class BlockRun:
    """Whole blocks of a shard: `nbytes` bytes from `offset`, and their SHA-256."""

    shard: str
    offset: int
    nbytes: int
    sha256: str

    @property
    def label(self) -> str:
        """A name for people."""
        return "header"

    @property
    def ranges(self) -> tuple["BlockRun"]:
        """The blocks that a reader fetches: the run itself."""
        return (self,)

    def range(self, start: int, stop: int) -> Range:
        """Bytes `start` to `stop` of this run. Raises `UserError` if they do not lie within it."""
        if not 0 <= start <= stop <= self.nbytes:
            raise UserError(f"{self.label}: bytes {start} to {stop}: expected a range within its {self.nbytes} bytes")
        return Range(self.shard, self.offset + start, self.offset + stop)


@dataclass(frozen=True)
class OpRun(BlockRun):
    """One variant of one linear of one layer: its packed weight, and the tensors stored with it (`extras`)."""

    layer: int
    op: str
    variant: str
    format: str
    format_version: int
    dtype: torch.dtype
    shape: tuple[int, int]
    pieces: Mapping[str, Piece]
    extras: Mapping[str, Piece]

    @property
    def label(self) -> str:
        """A name for people."""
        return f"layer {self.layer} {self.op} ({self.variant})"

    @property
    def dense_bytes(self) -> int:
        """Bytes of the packed matrix when dense: only the integers of int8 weights with scales."""
        return self.shape[0] * self.shape[1] * self.dtype.itemsize

    @property
    def scales_dtype(self) -> torch.dtype | None:
        """The type of the weight that int8 values and scales stand for; None without scales."""
        return self.extras[SCALES].dtype if SCALES in self.extras else None

    @property
    def scratch_bytes(self) -> int:
        """Bytes that `Packed.dense_in` needs for this weight: the matrix, and what its integers stand for."""
        widened = self.shape[0] * self.shape[1] * self.scales_dtype.itemsize if self.scales_dtype else 0
        return READABLE[self.format].scratch_bytes(self.shape, self.dtype) + widened

    def view(self, buffer: Buffer) -> Packed:
        """The packed weight, in place: its tensors are views of `buffer`, which starts with this run's first byte.

        Raises `FormatError` for tensors that the format cannot be made of. It does not check contents: `Store.verify`
        checks them once, and whatever they are, the weight's methods stay within its tensors.
        """
        tensors, extras = views(self.pieces, buffer), self.view_extras(buffer)
        return self._weight(READABLE[self.format].of_parts, self.shape, tensors, extras)

    def view_extras(self, buffer: Buffer) -> dict[str, Tensor]:
        """The tensors stored with the weight, as views of `buffer`."""
        return views(self.extras, buffer)

    def rows(self, first: int, last: int, index: Mapping[str, Tensor] | None = None) -> "Rows":
        """The rows from `first` up to, not including, `last`, with their scales.

        `index` holds the tensors that say where rows lie, for a format that has them: read `row_index` first.
        Raises `UserError` for rows that the matrix does not have, for a missing index, and for a format that does not
        tell where its rows lie.
        """
        if not 0 <= first <= last <= self.shape[0]:
            raise UserError(f"{self.label}: rows {first} to {last}: expected a range of its {self.shape[0]} rows")
        form, index = READABLE[self.format], index or {}
        if missing := self.row_index.pieces.keys() - index.keys():
            raise UserError(f"{self.label}: {min(missing)} says where rows lie: read `row_index` and pass it on")
        spans = form.row_slices(first, last, index)
        scales = {SCALES: self.extras[SCALES].part(slice(first, last))} if SCALES in self.extras else {}
        return Rows(self, {name: self.pieces[name].part(span) for name, span in spans.items()} | scales, last - first)

    @property
    def row_index(self) -> "Tensors":
        """The tensors that `rows` needs to know: none for most formats, the row offsets for sparse ones."""
        needed = READABLE[self.format].row_index
        return Tensors(self, {name: self.pieces[name] for name in needed if name in self.pieces})

    def unpacked(self, offset: int) -> Self:
        """The same op made dense, as it lies in memory from `offset` on. It describes a buffer and no file."""
        kept = {name: piece for name, piece in self.extras.items() if name == SCALES}
        pieces, nbytes = layout({"values": Piece(self.dtype, self.shape, 0), **kept})
        dense = {"format": Dense.name, "format_version": Dense.version, "pieces": {"values": pieces.pop("values")}}
        return replace(self, shard="", offset=offset, nbytes=nbytes, sha256="", extras=pieces, **dense)

    def _weight(self, make, shape: tuple[int, int], tensors: dict[str, Tensor], extras: Mapping[str, Tensor]) -> Packed:
        try:
            return with_extras(make(shape, self.dtype, tensors), extras)
        except (ValueError, TypeError, RuntimeError) as error:
            raise FormatError(f"{self.shard}: {self.label}: {line(error)}") from error


@dataclass(frozen=True)
class Tensors:
    """Some of the tensors of an op, or slices of them: `pieces`, whose offsets count from the op's first byte."""

    run: OpRun
    pieces: Mapping[str, Piece]

    @cached_property
    def ranges(self) -> tuple[Range, ...]:
        """The blocks that a reader fetches: one range for each tensor."""
        return tuple(self.run.range(piece.offset, piece.end) for piece in self.pieces.values())

    @property
    def nbytes(self) -> int:
        """Bytes of the buffer that the ranges fill, one behind the other."""
        return sum(found.nbytes for found in self.ranges)

    def tensors(self, buffer: Buffer) -> dict[str, Tensor]:
        """Each tensor, as a view of `buffer`, which holds what was read."""
        places, end = {}, 0
        for (name, piece), found in zip(self.pieces.items(), self.ranges, strict=True):
            places[name] = replace(piece, offset=end + found.start - found.offset)
            end += found.nbytes
        return views(places, buffer)


@dataclass(frozen=True)
class Rows(Tensors):
    """Adjoining rows of an op, `count` of them, as `OpRun.rows` finds them."""

    count: int

    def view(self, buffer: Buffer) -> Packed:
        """These rows as a packed weight, in place. Raises `FormatError` as `OpRun.view` does."""
        tensors = self.tensors(buffer)
        extras = {name: tensors.pop(name) for name in self.pieces if name not in self.run.pieces}
        shape = (self.count, self.run.shape[1])
        return self.run._weight(READABLE[self.run.format].of_rows, shape, tensors, extras)


@dataclass(frozen=True)
class RestRun(BlockRun):
    """A tensor that is no decoder linear's weight: an embedding, a norm, a bias, the head."""

    name: str
    pieces: Mapping[str, Piece]

    @property
    def label(self) -> str:
        """A name for people."""
        return self.name


@dataclass(frozen=True)
class Part:
    """Ops of a layer, each whole or some rows of it, that are read together."""

    ops: Mapping[str, OpRun | Rows]

    @property
    def ranges(self) -> tuple[Range | BlockRun, ...]:
        """The blocks that a reader fetches, in the order of the ops."""
        return tuple(found for op in self.ops.values() for found in op.ranges)

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the buffer that the ranges fill, one behind the other."""
        return sum(op.nbytes for op in self.ops.values())

    def view(self, buffer: Buffer) -> dict[str, Packed]:
        """The packed weight of each op, in place: `buffer` holds what was read."""
        found, end = {}, 0
        for name, op in self.ops.items():
            found[name], end = op.view(buffer[end:]), end + op.nbytes
        return found


@dataclass(frozen=True)
class Layer(Part):
    """All ops of a layer in one variant. Their runs adjoin, so that one read of `nbytes` from `offset` fetches them."""

    ops: Mapping[str, OpRun]

    @property
    def shard(self) -> str:
        """The file."""
        return next(iter(self.ops.values())).shard

    @property
    def offset(self) -> int:
        """The first byte in the shard."""
        return next(iter(self.ops.values())).offset

    @property
    def ranges(self) -> tuple["Layer"]:
        """The blocks that a reader fetches: the layer itself."""
        return (self,)

    def only(self, *names: str) -> Part:
        """Some of the ops, in this order. Raises `UserError` for an op that the layer does not have."""
        for name in names:
            if name not in self.ops:
                raise unknown("op of this layer", name, self.ops)
        return Part({name: self.ops[name] for name in names})

    def unpacked(self) -> "Layer":
        """The same layer made dense, as it lies in memory: one op behind the other. It describes no file."""
        ops, end = {}, 0
        for name, run in self.ops.items():
            ops[name] = run.unpacked(end)
            end += ops[name].nbytes
        return Layer(ops)


def in_order(run: BlockRun) -> tuple[str, int, int]:
    """A key that sorts runs as they lie in their shards. An empty run comes before one that starts at the same byte."""
    return run.shard, run.offset, run.nbytes


def views(pieces: Mapping[str, Piece], buffer: Buffer) -> dict[str, Tensor]:
    """Tensors over the bytes of `buffer`, an array or a tensor on any device, without a copy."""
    data = torch.from_numpy(buffer) if isinstance(buffer, np.ndarray) else buffer
    data = data if len(data) else data.new_empty(0)  # NumPy's empty arrays have strides of 0
    return {name: data[piece.offset : piece.end].view(piece.dtype).view(piece.shape) for name, piece in pieces.items()}

"""The parts of a store, and how the bytes that were read of them become tensors again.

Everything that can be read has `chunks` (the reads that a reader does), `nbytes` (the size of the buffer that they
fill) and `view` (the weights in that buffer).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

import numpy as np
import torch
from jaxtyping import UInt8
from torch import Tensor

from toolkit.formats import READABLE, FormatError, Packed
from toolkit.formats.dense import Dense
from toolkit.formats.scaled import SCALES, with_extras
from toolkit.records import line
from toolkit.storage.chunks import Chunks, in_line
from toolkit.storage.shards import BlockRun, Dtype, Piece, layout

Buffer = UInt8[np.ndarray, " bytes"] | UInt8[Tensor, " bytes"]


@dataclass(frozen=True)
class OpRun(BlockRun):
    """One variant of one linear of one layer: its packed weight, and the tensors stored with it (`extras`)."""

    layer: int
    op: str
    variant: str
    format: str
    format_version: int
    dtype: Dtype
    shape: tuple[int, int]
    pieces: Mapping[str, Piece]
    extras: Mapping[str, Piece]

    @property
    def label(self) -> str:
        """A name for people."""
        return f"layer {self.layer} {self.op} ({self.variant})"

    @property
    def dense_bytes(self) -> int:
        """Bytes of the packed matrix when dense; of int8 weights with scales, of the integers only."""
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
        try:
            weight = READABLE[self.format].of_parts(self.shape, self.dtype, views(self.pieces, buffer))
            return with_extras(weight, views(self.extras, buffer))
        except (ValueError, TypeError, RuntimeError) as error:
            raise FormatError(f"{self.shard}: {self.label}: {line(error)}") from error

    def unpacked(self, offset: int) -> Self:
        """The same op made dense, as it lies in memory from `offset` on. It describes a buffer and no file."""
        kept = {name: piece for name, piece in self.extras.items() if name == SCALES}
        pieces, nbytes = layout({"values": Piece(self.dtype, self.shape, 0), **kept})
        dense = {"format": Dense.name, "format_version": Dense.version, "pieces": {"values": pieces.pop("values")}}
        return replace(self, shard="", offset=offset, nbytes=nbytes, sha256="", extras=pieces, **dense)


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
class Layer:
    """Ops that are read together, one behind the other. The ops of a stored layer adjoin and are one read."""

    ops: Mapping[str, OpRun]

    @property
    def shard(self) -> str:
        """The file of the first op."""
        return next(iter(self.ops.values())).shard

    @property
    def offset(self) -> int:
        """The first byte of the first op in its shard."""
        return next(iter(self.ops.values())).offset

    @cached_property
    def chunks(self) -> list[Chunks]:
        """The reads that fill a buffer with the ops."""
        return in_line(self.ops.values())

    @cached_property
    def nbytes(self) -> int:
        """Bytes of that buffer."""
        return sum(op.nbytes for op in self.ops.values())

    def view(self, buffer: Buffer) -> dict[str, Packed]:
        """The packed weight of each op, in place: `buffer` holds what was read."""
        found, end = {}, 0
        for name, op in self.ops.items():
            found[name], end = op.view(buffer[end:]), end + op.nbytes
        return found

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

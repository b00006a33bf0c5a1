"""The parts of a store: runs of whole blocks in its shards, and how what was read of them becomes tensors again."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import UInt8
from torch import Tensor

from toolkit.formats import FORMATS, FormatError, Packed
from toolkit.formats.scaled import SCALES, Scaled
from toolkit.storage.shards import Piece


@dataclass(frozen=True)
class Run:
    """Whole blocks of a shard: `nbytes` bytes from `offset`, and their SHA-256."""

    shard: str
    offset: int
    nbytes: int
    sha256: str

    @property
    def label(self) -> str:
        """What it is, for people."""
        return "header"


@dataclass(frozen=True)
class OpRun(Run):
    """One variant of one linear of one layer: its packed weight, and tensors that go with it (`extras`)."""

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
        """What it is, for people."""
        return f"layer {self.layer} {self.op} ({self.variant})"

    @property
    def dense_bytes(self) -> int:
        """Bytes of what is packed when dense, be it integers that have scales."""
        return self.shape[0] * self.shape[1] * self.dtype.itemsize

    @property
    def scales_dtype(self) -> torch.dtype | None:
        """The type of the weight that integers with scales stand for; None without scales."""
        return self.extras[SCALES].dtype if SCALES in self.extras else None

    def view(self, buffer: UInt8[np.ndarray, " bytes"] | UInt8[Tensor, " bytes"]) -> Packed | Scaled:
        """The packed weight, in place: its tensors are views of `buffer`, which starts with this run's first byte.

        Raises `FormatError` for tensors that the format cannot be made of. Contents are not checked here;
        `Store.verify` does that once for all.
        """
        try:
            packed = FORMATS[self.format].of_parts(self.shape, self.dtype, views(self.pieces, buffer))
            return Scaled(packed, self.view_extras(buffer)[SCALES]) if SCALES in self.extras else packed
        except (ValueError, TypeError, RuntimeError) as error:
            raise FormatError(f"{self.shard}: {self.label}: {' '.join(str(error).split())}") from error

    def view_extras(self, buffer: UInt8[np.ndarray, " bytes"] | UInt8[Tensor, " bytes"]) -> dict[str, Tensor]:
        """The tensors stored with the weight, as views of `buffer`."""
        return views(self.extras, buffer)


@dataclass(frozen=True)
class RestRun(Run):
    """A tensor that is no decoder linear's weight: an embedding, a norm, a bias, the head."""

    name: str
    pieces: Mapping[str, Piece]

    @property
    def label(self) -> str:
        """What it is, for people."""
        return self.name


@dataclass(frozen=True)
class Layer:
    """All ops of a layer in one variant: adjoining runs, so that one read of `nbytes` from `offset` fetches them."""

    shard: str
    offset: int
    nbytes: int
    ops: Mapping[str, OpRun]

    def view(self, buffer: UInt8[np.ndarray, " bytes"] | UInt8[Tensor, " bytes"]) -> dict[str, Packed | Scaled]:
        """Each op's packed weight, in place: `buffer` holds what was read of the layer."""
        return {name: run.view(buffer[run.offset - self.offset :]) for name, run in self.ops.items()}


def in_order(run: Run) -> tuple[str, int, int]:
    """A key that sorts runs as they lie in their shards; an empty one comes before what starts at the same byte."""
    return run.shard, run.offset, run.nbytes


def views(
    pieces: Mapping[str, Piece], buffer: UInt8[np.ndarray, " bytes"] | UInt8[Tensor, " bytes"]
) -> dict[str, Tensor]:
    """Tensors over the bytes of `buffer`, an array or a tensor on any device, without a copy."""
    data = torch.from_numpy(buffer) if isinstance(buffer, np.ndarray) else buffer
    return {name: data[piece.offset : piece.end].view(piece.dtype).view(piece.shape) for name, piece in pieces.items()}

"""One shard: a safetensors file whose tensors lie so that a disk can read them past the page cache.

    [length, JSON header, spaces][q_proj: bitmap · offsets · values ·][k_proj: bitmap · ...]
    0                            4096·a                               4096·b

A group of tensors is one op of a layer. Each group starts on a block of 4096 bytes, and groups follow each other
without a gap, so one direct read fetches one group or all of them. Within a group each tensor starts at a multiple of
256 bytes, which suits any load instruction of a CPU or GPU. The safetensors format allows no holes: tensors named
`__padding_<number>__` fill them.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated

import torch
from pydantic import PlainSerializer, PlainValidator
from torch import Tensor

from toolkit.models.on_demand import Rows
from toolkit.storage.chunks import Chunks, in_line
from toolkit.storage.direct import BLOCK_BYTES

TENSOR_BYTES = 256  # places of tensors within a group are multiples of this
PADDING = "__padding_"

DTYPES = {  # the types that formats store, and their names in safetensors files
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
NAMES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES}


def _dtype(name: str) -> torch.dtype:
    if name not in NAMES:
        raise ValueError(f"expected one of {', '.join(NAMES)}")
    return NAMES[name]


# the index calls a type by its name
Dtype = Annotated[torch.dtype, PlainValidator(_dtype), PlainSerializer(lambda dtype: str(dtype)[len("torch.") :])]


@dataclass(frozen=True)
class Piece:
    """The place of a tensor: `offset` bytes from the start of its group (in a header: from the start of the data)."""

    dtype: Dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        count = self.dtype.itemsize
        for size in self.shape:
            count *= size
        return count

    @property
    def end(self) -> int:
        """The first byte behind the tensor."""
        return self.offset + self.nbytes


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
    def identity(self) -> str:
        """A text that only runs of the same bytes share."""
        return self.sha256

    @cached_property
    def chunks(self) -> list[Chunks]:
        """The read of the whole run, to the start of a buffer."""
        return in_line([self])


def layout(tensors: Mapping[str, Tensor | Rows | Piece]) -> tuple[dict[str, Piece], int]:
    """The place of each tensor of a group, and the bytes of the group, which are whole blocks."""
    pieces, end = {}, 0
    for name, tensor in tensors.items():
        pieces[name] = Piece(tensor.dtype, tuple(tensor.shape), _up(end, TENSOR_BYTES))
        end = pieces[name].end
    return pieces, _up(end, BLOCK_BYTES)


def write_shard(
    path: Path, groups: Sequence[Mapping[str, Tensor | Rows]], prefixes: Sequence[str], metadata: Mapping[str, str]
) -> list[BlockRun]:
    """Write groups of tensors and wait until the disk has them. The header names each tensor `<prefix><name>`.

    Returns the run of the header, then one for each group, in order.
    Raises `OSError` if the disk fails or is full; the file is incomplete then.
    """
    header = _header([layout(tensors) for tensors in groups], prefixes, metadata)
    with open(path, "xb", buffering=0) as stream:
        _write_all(stream, header)
        runs, offset = [BlockRun(path.name, 0, len(header), hashlib.sha256(header).hexdigest())], len(header)
        for tensors in groups:
            digest = hashlib.sha256()
            for part in _parts(tensors):
                _write_all(stream, part)
                digest.update(part)
            nbytes = stream.tell() - offset
            runs.append(BlockRun(path.name, offset, nbytes, digest.hexdigest()))
            offset += nbytes
        os.fsync(stream.fileno())
        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # later reads bypass the page cache
    return runs


def raw(tensor: Tensor) -> memoryview:
    """The tensor's bytes in row-major order, without a copy if it is contiguous and on the CPU."""
    return memoryview(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())


def _parts(tensors: Mapping[str, Tensor | Rows]) -> Iterator[bytes | memoryview]:
    """The bytes of a group in pieces, with its padding."""
    pieces, size = layout(tensors)
    end = 0
    for name, piece in pieces.items():
        yield bytes(piece.offset - end)
        tensor = tensors[name]
        yield from map(raw, tensor if isinstance(tensor, Rows) else (tensor,))
        end = piece.end
    yield bytes(size - end)


def _header(layouts: list[tuple[dict[str, Piece], int]], prefixes: Sequence[str], metadata: Mapping[str, str]) -> bytes:
    entries, start = {"__metadata__": dict(metadata)}, 0
    holes = 0
    for prefix, (pieces, size) in zip(prefixes, layouts, strict=True):
        end = 0
        for name, piece in [*pieces.items(), (None, Piece(torch.uint8, (0,), size))]:
            if piece.offset > end:
                entries[f"{PADDING}{holes}__"] = _entry(torch.uint8, (piece.offset - end,), start + end)
                holes += 1
            if name is not None:
                entries[prefix + name] = _entry(piece.dtype, piece.shape, start + piece.offset)
            end = piece.end
        start += size
    text = json.dumps(entries, separators=(",", ":")).encode()
    text = text.ljust(_up(len(text) + 8, BLOCK_BYTES) - 8)
    return len(text).to_bytes(8, "little") + text


def _entry(dtype: torch.dtype, shape: tuple[int, ...], offset: int) -> dict:
    piece = Piece(dtype, shape, offset)
    return {"dtype": DTYPES[dtype], "shape": list(shape), "data_offsets": [offset, piece.end]}


def _write_all(stream, data) -> None:
    view = memoryview(data)
    while view:
        view = view[stream.write(view) :]


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple

"""Where the weights of a decoder lie in its GGUF file, in pieces that are kept in memory or read one after the other.

A block is four pieces, so that the two buffers that pieces pass through are small: those of attention, and the three
matrices of the FFN. Parts of the head follow.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import NamedTuple

import numpy as np
from jaxtyping import Float32, UInt8

from toolkit.kernels.blocks import decoded_by_gguf
from toolkit.models.gguf_header import LAYERS, GgufHeader, GgufTensor, decoded
from toolkit.offload.decoder.architecture import EMBEDDING, HEAD, ROUTED, SHARED, Architecture
from toolkit.storage.direct import BLOCK_BYTES, StoredFile
from toolkit.storage.tensor_ranges import FileLayer, TensorRange

ATTENTION, FFN = ("attn_q", "attn_k", "attn_v", "attn_output"), ("gate", "up", "down")  # matrices of a block
TILE = 16  # rows of a part of the head are a multiple


class MatrixBlocks(NamedTuple):
    """A matrix of GGUF blocks in memory."""

    kind: str
    data: UInt8[np.ndarray, "rows bytes"]


@dataclass(frozen=True)
class FileMatrix:
    """A matrix in a file."""

    parts: tuple[TensorRange]
    dense_bytes: int = 0  # nothing makes it dense
    scratch_bytes: int = 0

    def view(self, data: Callable[[TensorRange], UInt8[np.ndarray, " bytes"]]) -> MatrixBlocks:
        """The matrix, in place: `data` gives the bytes from the first one of a range on."""
        (part,) = self.parts
        return MatrixBlocks(part.kind, data(part)[: part.nbytes].reshape(part.shape[0], -1))


@dataclass(frozen=True)
class ExpertRanges(Sequence[FileLayer]):
    """The experts of a block, each with its matrices, by name: the parts of these ranges, of `count` equal ones."""

    matrices: Mapping[str, TensorRange]
    count: int

    def __len__(self) -> int:
        """The experts."""
        return self.count

    def __getitem__(self, expert: int) -> FileLayer:  # type: ignore[override]
        """One of them. It is made anew, since thousands would take much memory."""
        expert = range(self.count)[expert]
        rows = {name: whole.shape[0] // self.count for name, whole in self.matrices.items()}
        return _piece({name: whole.rows(expert * rows[name], rows[name]) for name, whole in self.matrices.items()})

    @property
    def nbytes(self) -> int:
        """Bytes of one."""
        return sum(whole.nbytes for whole in self.matrices.values()) // self.count

    @property
    def slot_bytes(self) -> int:
        """Bytes that hold what is read of any of them."""
        largest = max(self[expert].nbytes for expert in (0, self.count - 1))
        return largest + len(self.matrices) * BLOCK_BYTES  # others may begin nearer to the end of a block


@dataclass(frozen=True)
class DecoderFile:
    """A GGUF file with the weights of a decoder. `layers` are its pieces, block by block, and the parts of its head.

    `experts` are the routed experts of each block that is a mixture. `vectors` are norms, biases and routers, decoded,
    by their names in the file.
    """

    header: GgufHeader
    layers: Sequence[FileLayer]
    vectors: Mapping[str, Float32[np.ndarray, " size"]]
    embedding: TensorRange
    shards: Mapping[str, StoredFile]
    experts: Sequence[ExpertRanges] = ()

    @classmethod
    def of(cls, header: GgufHeader, architecture: Architecture) -> "DecoderFile":
        """The file of this header. Raises `OSError`."""
        tensors, pieces, blocks = header.tensors, _pieces(architecture), range(architecture.blocks)
        names = [f"{LAYERS}{number}.{name}.weight" for number in blocks for piece in pieces for name in piece]
        matrices = {name: _range(tensors[name]) for name in (*names, EMBEDDING, HEAD) if name in tensors}
        layers = [
            _piece({name: matrices[name] for name in (f"{LAYERS}{number}.{name}.weight" for name in names)})
            for number in blocks
            for names in pieces
        ]
        head = [*_parts(matrices.get(HEAD, matrices[EMBEDDING]), architecture)]
        layers += [_piece({f"{HEAD}.{part}": rows}) for part, rows in enumerate(head)]
        mixture = architecture.mixture
        experts = [_experts(tensors, number, mixture.experts) for number in blocks] if mixture else []
        own = {f"{LAYERS}{number}.{name}" for number in range(len(experts)) for name in experts[number].matrices}
        vectors = {
            architecture.name_of(name): decoded(tensor).astype(np.float32)
            for name, tensor in tensors.items()
            if name not in matrices and name not in own
        }
        shards = {str(file): StoredFile.of(file) for file in header.files}
        return cls(header, layers, vectors, matrices[EMBEDDING], shards, experts)

    @cached_property
    def piece_of(self) -> Mapping[str, int]:
        """The number of the piece that has a matrix, by the matrix's name in the file; the head has a name a part."""
        return {name: number for number, layer in enumerate(self.layers) for name in layer.ops}

    @property
    def head(self) -> Mapping[str, int]:
        """The words of each part of the head, by its name."""
        ops = (op for layer in self.layers for op in layer.ops.items())
        return {name: op.parts[0].shape[0] for name, op in ops if name.startswith(f"{HEAD}.")}

    def files(self, *variants: str) -> Mapping[str, StoredFile]:
        """All files of the model."""
        return self.shards

    def rows(self, tokens: Sequence[int]) -> Float32[np.ndarray, "tokens hidden"]:
        """The rows of the embedding. Raises `OSError`, and `ChangedError` if the file has changed."""
        part, file = self.embedding, self.shards[self.embedding.file]
        file.check()
        data = file.unchanged(lambda: _read_rows(file, part, tokens))
        return np.ascontiguousarray(decoded_by_gguf(part.kind, data), np.float32)

    @property
    def vector_bytes(self) -> int:
        """Bytes of all norms and biases."""
        return sum(vector.nbytes for vector in self.vectors.values())


def _read_rows(file: StoredFile, part: TensorRange, tokens: Sequence[int]) -> UInt8[np.ndarray, "tokens bytes"]:
    """Rows of a matrix, which do not stay in the page cache."""
    data = np.empty((len(tokens), part.row_bytes), np.uint8)
    with open(file.path, "rb", buffering=0) as stream:
        for token, row in zip(tokens, data, strict=True):
            offset = part.offset + token * part.row_bytes
            if os.preadv(stream.fileno(), [row], offset) != part.row_bytes:
                raise OSError(f"short read of {file.path} at byte {offset}")
            os.posix_fadvise(stream.fileno(), offset, part.row_bytes, os.POSIX_FADV_DONTNEED)
    return data


def _pieces(sizes: Architecture) -> list[tuple[str, ...]]:
    """The matrices of each piece of a block."""
    if sizes.mixture and not sizes.mixture.shared:
        return [ATTENTION]
    return [ATTENTION, *((f"ffn_{name}{SHARED if sizes.mixture else ''}",) for name in FFN)]


def _experts(tensors: Mapping[str, GgufTensor], block: int, count: int) -> ExpertRanges:
    names = [f"ffn_{name}{ROUTED}.weight" for name in FFN]
    return ExpertRanges({name: _range(tensors[f"{LAYERS}{block}.{name}"]) for name in names}, count)


def _range(tensor: GgufTensor) -> TensorRange:
    """Where a matrix lies; of several, all their rows."""
    *rows, columns = tensor.shape
    return TensorRange(str(tensor.file), tensor.offset, tensor.nbytes, tensor.kind, (prod(rows), columns))


def _piece(matrices: Mapping[str, TensorRange]) -> FileLayer:
    return FileLayer.of({name: FileMatrix((matrix,)) for name, matrix in matrices.items()})


def _parts(head: TensorRange, sizes: Architecture) -> Iterator[TensorRange]:
    """Parts of the head with no more weights than the largest matrix of a block."""
    largest = sizes.hidden * max(sizes.ffn, sizes.heads * sizes.head_size)
    rows = max(largest // sizes.hidden // TILE, 1) * TILE
    for first in range(0, head.shape[0], rows):
        yield head.rows(first, min(rows, head.shape[0] - first))

"""A GGUF file as a store: its own blocks are the weights, and nothing is written.

    store = GgufStore.open("model.gguf")
    store.layer(0, VARIANT).ops["self_attn.q_proj"].parts    # where its blocks lie in the file

Linears of decoder blocks and the head stay blocks; a head that is the embedding, too, is read in parts like any other.
Rows of the embedding are read when they are needed. All other tensors, such as norms and biases, are small and are
decoded into memory. The file has no checksums: it must keep its size and its times while it is open.
"""

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from jaxtyping import Int64
from torch import Tensor, nn

from toolkit.errors import UserError
from toolkit.files import path_of
from toolkit.formats import FormatError
from toolkit.formats.ggml import TYPES
from toolkit.models import decoder_blocks, decoder_linears
from toolkit.models.gguf import check_header, plan
from toolkit.models.gguf_config import FAMILIES
from toolkit.models.gguf_header import GgufHeader, GgufTensor, read_header
from toolkit.models.gguf_tensors import Placement, TensorLayout, fill
from toolkit.models.head import HEAD, rows_of_part
from toolkit.models.plain import DOWN, RoutedExperts, plain
from toolkit.storage.direct import StoredFile
from toolkit.storage.experts import LAYOUT, op_name
from toolkit.storage.file_ops import FileOp, packed
from toolkit.storage.store import Store
from toolkit.storage.tensor_ranges import FileLayer, TensorRange

VARIANT = "gguf"  # of decoder blocks that are read whole, and of a mixture's parts that are no routed experts
ALIGNMENT = 8  # bytes: the least that the format of GGUF files allows


@dataclass(frozen=True)
class Decoded:
    """A parameter that is decoded into memory, and the tensors that fill it; `apart`: the names of its parts."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: tuple[Placement, ...]
    apart: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        """Its bytes in memory."""
        return prod(self.shape) * self.dtype.itemsize

    def values(self) -> Iterator[tuple[str, Tensor]]:
        """The decoded parameter, or each of its parts, by its name."""
        values = torch.empty(self.shape, dtype=self.dtype)
        for part in self.parts:
            fill(values, part)
        yield from zip(self.apart, values, strict=True) if self.apart else [(self.name, values)]

    @property
    def identity(self) -> str:
        """A text that only parameters of the same bytes share: where they lie."""
        return " ".join(f"{part.tensor.file}:{part.tensor.offset}" for part in self.parts)


@dataclass(frozen=True)
class FileExperts:
    """The routed experts of a block, each with its two linears, `up` and `down`, which are read together."""

    ops: Mapping[str, FileLayer]

    @property
    def nbytes(self) -> int:
        """Bytes of all of them."""
        return sum(op.nbytes for op in self.ops.values())

    @property
    def dense_bytes(self) -> int:
        """Bytes of the largest weight when dense."""
        return max(op.dense_bytes for op in self.ops.values())


@dataclass(frozen=True)
class FileIndex:
    """Where all weights lie: those that are decoded into memory (`rest`), blocks and parts of the head, embedding."""

    rest: tuple[Decoded, ...]
    layers: Mapping[tuple[int, str], FileLayer | FileExperts]
    embedding: TensorRange


@dataclass(frozen=True, eq=False, repr=False)
class GgufStore(Store):
    """An opened GGUF file, or all pieces of a split one."""

    index: FileIndex
    header: GgufHeader
    settings: Any
    """The configuration of transformers; its `dtype` is that of activations and of weights that are made dense."""
    part_rows: int

    @classmethod
    def open(cls, folder: str | os.PathLike) -> Self:
        """Read the header, and find the place of each weight. Raises what `read_header` and `of` raise."""
        return cls.of(read_header(path_of(folder)))

    @classmethod
    def of(cls, header: GgufHeader) -> Self:
        """The store of a file whose header was read.

        Raises `UserError` for an architecture that cannot be read in blocks, and for blocks of an unknown type.
        """
        try:
            check_header(header)
            if header.architecture not in FAMILIES:
                raise UserError(
                    f"files of architecture {header.architecture!r:.99} do not run as they are, only those of "
                    f"{', '.join(sorted(FAMILIES))}: pack it first"
                )
            dtype = getattr(torch, header.dtype)
            model, placed = plan(header)
            contents, rows = _indexed(model, placed, dtype)
        except UserError as error:
            raise UserError(f"{header.file}: {error}") from error
        model.config.dtype = dtype
        shards = {str(file): _stored(file) for file in header.files}
        return cls(header.file, contents, shards, header, model.config, rows)

    @property
    def model(self) -> Mapping[str, object]:
        """The name of the model in the file, and its quantisation."""
        return {"name": self.header.metadata.get("general.name"), "quantisation": self.header.quantisation}

    @property
    def model_folder(self) -> Path:
        """The file itself, which has configuration and tokenizer."""
        return self.folder

    @property
    def head_rows(self) -> int:
        """The rows of each part of the head."""
        return self.part_rows

    @property
    def variants(self) -> tuple[str, ...]:
        """How the file is run: experts on demand, or blocks whole."""
        return (LAYOUT,) if any(variant == LAYOUT for _, variant in self.layers) else (VARIANT,)

    @property
    def layers(self) -> Mapping[tuple[int, str], Any]:
        """The blocks and the parts of the head."""
        return self.index.layers

    @property
    def ops_bytes(self) -> int:
        """The bytes of all blocks and of the head, as they are read."""
        return sum(layer.nbytes for layer in self.layers.values())

    @property
    def largest_bytes(self) -> int:
        """The bytes of the largest weight when dense; of all experts of a block, that of one."""
        return max(layer.dense_bytes for layer in self.layers.values())

    @property
    def rest_bytes(self) -> int:
        """The bytes of tensors that are decoded, in memory."""
        return sum(run.nbytes for run in self.index.rest)

    def config(self) -> Any:
        """The configuration of transformers that the header describes."""
        return self.settings

    def generation_config(self) -> None:
        """The file has none; transformers takes the ends of a text from the configuration."""

    def files(self, *variants: str) -> Mapping[str, StoredFile]:
        """All files of the model."""
        return self.shards

    def rest(self, without: Collection[str | None] = ()) -> Iterator[tuple[str, Tensor]]:
        """The tensors that are decoded, except the names in `without`: one at a time, by their names."""
        for run in self.index.rest:
            if run.name not in without:
                yield from run.values()

    def row(self, name: str, number: int) -> Tensor:
        """One row of the embedding [1, hidden]. Raises `ChangedError` if the file has changed."""
        row = self.index.embedding.rows(number, 1)
        data = self.shards[row.file].content(row.offset, row.nbytes)
        return packed(row, data, self.settings.dtype).decode()

    def verify(self, *variants: str) -> None:
        """Nothing: the file has no checksums."""

    def verify_files(self) -> None:
        """Nothing: the file has no checksums."""

    def check_fits(self, model: nn.Module, variant: str) -> None:
        """Nothing: each tensor was placed into this model when the file was opened."""


def open_store(place: str | os.PathLike) -> Store:
    """The store at a place: a GGUF file, or a folder that `pack` wrote. Raises what their `open` raises."""
    return (GgufStore if path_of(place).is_file() else Store).open(place)


def _indexed(model: nn.Module, placed: list[Placement], dtype: torch.dtype) -> tuple[FileIndex, int]:
    """Where the weights of a model on the device "meta" lie, and the rows of a part of the head."""
    tensors: dict[str, list[Placement]] = {}
    for part in placed:
        tensors.setdefault(part.parameter, []).append(part)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    names = {id(module): name for name, module in plain(model).named_modules()}
    embedding, head = (
        f"{names[id(it)]}.weight" for it in (model.get_input_embeddings(), model.get_output_embeddings())
    )
    experts = {f"{place}.": mixture for place, mixture in model.named_modules() if isinstance(mixture, RoutedExperts)}
    layers, taken = {}, {embedding, head}
    for number, block in enumerate(decoder_blocks(model)):
        ops, of_experts = {}, {}
        for name in decoder_linears(block):
            parameter, expert = _parameter(f"{names[id(block)]}.{name}", experts)
            parts, source = _parts(tensors[parameter], shapes[parameter], expert)
            op = FileOp(number, name, dtype, parts, source)
            taken.add(parameter)
            if expert is None:
                ops[name] = op
            else:
                of_experts.setdefault(op_name(expert), {})[name.rpartition(".")[2]] = op
        layers[number, VARIANT] = FileLayer.of(ops)
        if of_experts:
            layers[number, LAYOUT] = FileExperts({name: FileLayer.of(pair) for name, pair in of_experts.items()})
    (matrix,) = tensors[head if head in tensors else embedding]
    rows, whole = rows_of_part(model), _range(matrix.name, matrix.tensor)
    for number, first in enumerate(range(0, whole.shape[0], rows), len(decoder_blocks(model))):
        part = whole.rows(first, min(rows, whole.shape[0] - first))
        layers[number, VARIANT] = FileLayer.of({HEAD: FileOp(number, HEAD, dtype, (part,))})
    rest = tuple(_decoded(name, shapes[name], dtype, tensors[name], experts) for name in tensors if name not in taken)
    (matrix,) = tensors[embedding]
    return FileIndex(rest, layers, _range(matrix.name, matrix.tensor)), rows


def _parameter(linear: str, experts: Mapping[str, RoutedExperts]) -> tuple[str, int | None]:
    """The parameter of transformers that holds a linear's weight; with the number of the expert, if it is one's."""
    for place, mixture in experts.items():
        if linear.startswith(place):
            number, kind = linear.removeprefix(place).split(".")
            return place + (mixture.fused.up if kind == "up" else DOWN), int(number)
    return f"{linear}.weight", None


def _parts(
    tensors: Sequence[Placement], shape: tuple[int, ...], expert: int | None
) -> tuple[tuple[TensorRange, ...], Int64[np.ndarray, " rows"] | None]:
    """The ranges that hold a parameter of this shape, or one expert of it, and the source of each row (`Parted`)."""
    rows = np.concatenate([_rows(it.layout, shape) for it in tensors])
    ranges = tuple(_range(it.name, it.tensor, expert) for it in tensors)
    return ranges, None if np.array_equal(rows, np.arange(len(rows))) else np.argsort(rows)


def _range(name: str, tensor: GgufTensor, expert: int | None = None) -> TensorRange:
    """Where a matrix lies; of an expert, its part of the tensor, whose parts follow each other."""
    if tensor.kind not in TYPES:
        raise UserError(f"its tensor {name!r:.99} has type {tensor.kind}; expected one of {', '.join(TYPES)}")
    if tensor.offset % ALIGNMENT:
        raise UserError(f"its tensor {name!r:.99} lies at byte {tensor.offset}; expected a multiple of {ALIGNMENT}")
    count = 1 if expert is None else tensor.shape[0]
    nbytes = tensor.nbytes // count
    return TensorRange(str(tensor.file), tensor.offset + (expert or 0) * nbytes, nbytes, tensor.kind, tensor.shape[-2:])


def _rows(layout: TensorLayout, shape: tuple[int, ...]) -> Int64[np.ndarray, " rows"]:
    """The row of the parameter that each row of a tensor fills; of all experts alike."""
    count = shape[-1] if layout.transposed else shape[-2]
    numbers = torch.arange(count)[None] if layout.transposed else torch.arange(count)[:, None]
    return layout.view(numbers if len(shape) == 2 else numbers[None]).flatten().numpy()


def _decoded(
    name: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    parts: Sequence[Placement],
    experts: Mapping[str, RoutedExperts],
) -> Decoded:
    """A parameter that is decoded. Biases of experts are tensors of their own."""
    apart: tuple[str, ...] = ()
    for place, mixture in experts.items():
        if name.startswith(place):
            kind = "up" if name.removeprefix(place).startswith(mixture.fused.up) else "down"
            apart = tuple(f"{place}{number}.{kind}.bias" for number in range(shape[0]))
    return Decoded(name, shape, dtype, tuple(parts), apart)


def _stored(file: Path) -> StoredFile:
    try:
        return StoredFile.of(file)
    except OSError as error:
        raise FormatError(f"{file}: cannot be read: {error.strerror}") from error

"""A store: a model or a layer as a folder of aligned shards, opened for reading.

store = Store.open(folder)
with open_reader(None, store, "endor") as reader:
    slot = aligned_buffer(store.slot_bytes("endor"))
    layer = store.layer(0, "endor")
    reader.read(layer.chunks, slot)
    weights = layer.view(slot)          # op -> Packed, in place
"""

import hashlib
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from html import escape
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from jaxtyping import UInt8
from torch import Tensor, nn

from toolkit.errors import UserError, unknown
from toolkit.files import check_memory, file_sha256, path_of
from toolkit.formats import FormatError
from toolkit.models import decoder_blocks
from toolkit.models.head import HEAD, TILE, head_parts, linears_by_layer
from toolkit.models.skeleton import read_config, read_generation_config
from toolkit.records import line
from toolkit.storage import index
from toolkit.storage.direct import StoredFile, uncached
from toolkit.storage.head_packing import HEAD_ROWS
from toolkit.storage.index import MODEL_FOLDER, Index
from toolkit.storage.packing import linear_weights, tensors_beside
from toolkit.storage.runs import Layer, OpRun, in_order, views
from toolkit.storage.shards import BlockRun

VERIFY_BYTES = 8 << 20  # read and hashed at a time


@dataclass(frozen=True, eq=False, repr=False)
class Store:
    """An opened store, which knows where everything lies. `toolkit.storage.readers` reads it."""

    folder: Path
    index: Index
    shards: Mapping[str, StoredFile]

    @classmethod
    def open(cls, folder: str | os.PathLike) -> Self:
        """Read and check the index, and check that each shard is there with its size. `verify` checks the contents.

        Raises `FormatError`, which names the file and the part of it that is wrong.
        """
        folder = path_of(folder)
        contents = index.read(folder / index.FILE)
        for name in contents.files:
            if not (folder / name).is_file():
                raise FormatError(f"{folder / name}: missing, though the index names it; pack the model again")
        runs: dict[str, list[BlockRun]] = {}
        for run in contents.runs:
            runs.setdefault(run.shard, []).append(run)
        shards = {it.file: _shard(folder / it.file, it.nbytes, runs.get(it.file, [])) for it in contents.shards}
        return cls(folder, contents, shards)

    def __repr__(self) -> str:
        """The folder, and the size of each variant."""
        sizes = ", ".join(f"{variant} {self.nbytes(variant) / 1e6:.1f} MB" for variant in self.variants)
        return f"Store({str(self.folder)!r}: {sizes})"

    def _repr_html_(self) -> str:
        sizes = {name: self.nbytes(name) for name in self.variants} | {"beside the variants": self.rest_bytes}
        cells = "".join(f"<tr><th>{escape(name)}</th><td>{size / 1e6:.1f} MB</td></tr>" for name, size in sizes.items())
        return f"<table><caption>{escape(str(self.folder))}</caption>{cells}</table>"

    @property
    def model(self) -> Mapping[str, object]:
        """The writer's record of the model."""
        return self.index.model

    @property
    def model_folder(self) -> Path:
        """The folder of configuration and tokenizer, in Hugging Face's layout."""
        return self.folder / MODEL_FOLDER

    @property
    def head_rows(self) -> int | None:
        """The rows of each part of the head, which are layers after the last block; None if it is not packed."""
        rows = self.model.get(HEAD_ROWS)
        if rows is None or (isinstance(rows, int) and not isinstance(rows, bool) and rows >= TILE):
            return rows
        raise FormatError(f"{self.folder}: {HEAD_ROWS} is {rows!r:.99}; expected a number of rows, at least {TILE}")

    @cached_property
    def layers(self) -> Mapping[tuple[int, str], Any]:
        """Each layer's runs, by number and variant."""
        runs: dict[tuple[int, str], list[OpRun]] = {}
        for run in self.index.ops:
            runs.setdefault((run.layer, run.variant), []).append(run)
        return {key: Layer({run.op: run for run in sorted(found, key=in_order)}) for key, found in sorted(runs.items())}

    @cached_property
    def variants(self) -> tuple[str, ...]:
        """The names of all variants, sorted."""
        return tuple(sorted({variant for _, variant in self.layers}))

    def layer(self, number: int, variant: str) -> Layer:
        """One layer's ops in one variant. Raises `UserError` if the store has no such layer or variant."""
        if (found := self.layers.get((number, variant))) is None:
            count = len(self.layers_of(variant))
            raise UserError(f"no layer {number} in variant {variant!r} of {self.folder}: it has {count} layers")
        return found

    def layers_of(self, variant: str) -> list[Layer]:
        """All layers in one variant, in order. Raises `UserError` for an unknown variant."""
        if variant not in self.variants:
            raise unknown(f"variant of {self.folder.name}", variant, self.variants)
        return [layer for (_, found), layer in self.layers.items() if found == variant]

    def slot_bytes(self, variant: str) -> int:
        """The bytes of the largest layer of this variant. Raises `UserError` for an unknown variant."""
        return max(layer.nbytes for layer in self.layers_of(variant))

    def nbytes(self, variant: str) -> int:
        """The bytes of all layers in this variant on the disk."""
        return sum(layer.nbytes for layer in self.layers_of(variant))

    def tensor_bytes(self, variant: str) -> int:
        """The bytes of the same layers' tensors, without the padding for alignment."""
        runs = [run for layer in self.layers_of(variant) for run in layer.ops.values()]
        return sum(piece.nbytes for run in runs for piece in (*run.pieces.values(), *run.extras.values()))

    @property
    def ops_bytes(self) -> int:
        """The bytes of all layers in all variants."""
        return sum(run.nbytes for run in self.index.ops)

    @property
    def largest_bytes(self) -> int:
        """The bytes of the largest weight when dense."""
        return max((run.dense_bytes for run in self.index.ops), default=0)

    @property
    def rest_bytes(self) -> int:
        """The bytes on the disk of all tensors beside the ops' weights."""
        return sum(run.nbytes for run in self.index.rest)

    def files(self, *variants: str) -> dict[str, StoredFile]:
        """The shards of these variants, or of all. Raises `UserError` for an unknown variant."""
        layers = [layer for variant in variants or self.variants for layer in self.layers_of(variant)]
        return {layer.shard: self.shards[layer.shard] for layer in layers}

    def rest(self, without: Collection[str | None] = ()) -> Iterator[tuple[str, Tensor]]:
        """The tensors beside the ops' weights, except the names in `without`: one at a time, each with its name.

        Raises `FormatError` for a damaged tensor, and `ChangedError` if its shard was replaced or cut meanwhile.
        """
        for run in self.index.rest:
            if run.name not in without:
                yield run.name, views(run.pieces, self._content(run))[run.name]

    def config(self):
        """The configuration of transformers. Raises `UserError` as `read_config` does."""
        runs = [*self.index.ops, *self.index.rest]
        return read_config(self.model_folder, [piece.shape for run in runs for piece in run.pieces.values()])

    def generation_config(self):
        """The settings of `generate`; None if there are none. Raises `UserError` as `read_generation_config` does."""
        return read_generation_config(self.model_folder)

    def row(self, name: str, number: int) -> Tensor:
        """One row [1, columns] of a matrix beside the ops' weights. Raises `ChangedError` if its shard has changed."""
        return self.rows(name, number, number + 1)

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Rows [rows, columns] of a matrix beside the ops' weights. Raises `ChangedError` if its shard has changed."""
        run = self._beside[name]
        piece = run.pieces[name]
        nbytes = piece.nbytes // piece.shape[0]
        data = self.shards[run.shard].content(run.offset + piece.offset + start * nbytes, (stop - start) * nbytes)
        return torch.from_numpy(data).view(piece.dtype).view(stop - start, *piece.shape[1:])

    def tensor(self, name: str) -> Tensor:
        """One of the tensors beside the ops' weights. Raises what `rest` raises."""
        run = self._beside[name]
        return views(run.pieces, self._content(run))[name]

    @cached_property
    def _beside(self) -> Mapping[str, Any]:
        return {run.name: run for run in self.index.rest}

    def verify(self, *variants: str) -> None:
        """Read every byte, compare checksums, and check that each packed weight of these variants agrees with itself.

        Checksums find damage. The checks of the formats find the contents of a faulty or hostile writer. Raises
        `FormatError`, which names the file and the damaged part, and `ChangedError` for a replaced or cut file.
        """
        self.verify_files()
        others = {id(run) for run in self.index.ops if variants and run.variant not in variants}
        for run in sorted((run for run in self.index.runs if id(run) not in others), key=in_order):
            if not isinstance(run, OpRun):  # an embedding may be larger than the memory that it will not take
                self._check(run, _parts(run, self.shards[run.shard].content))
            else:
                check_memory(run.nbytes, run.label)
                data = self._content(run)
                try:
                    run.view(data).check()
                except FormatError:
                    raise
                except (ValueError, IndexError, RuntimeError) as error:
                    path = self.folder / run.shard
                    raise FormatError(f"{path}: {run.label}: inconsistent {run.format}: {line(error)}") from error

    def _content(self, run: BlockRun) -> UInt8[np.ndarray, " bytes"]:
        """The bytes of a run. Raises `FormatError` for damage, and `ChangedError` for a file that has changed."""
        data = self.shards[run.shard].content(run.offset, run.nbytes)
        self._check(run, [data])
        return data

    def _check(self, run: BlockRun, parts: Iterable[np.ndarray]) -> None:
        if _sha256(parts) != run.sha256:
            path = self.folder / run.shard
            raise FormatError(f"{path}: damaged: {run.label} does not match its checksum; pack the model again")

    def verify_files(self) -> None:
        """Verify only the files beside the shards: configuration and tokenizer."""
        for name, sha256 in self.index.files.items():
            if file_sha256(self.folder / name) != sha256:
                path = self.folder / name
                raise FormatError(f"{path}: damaged: it does not match its checksum; pack the model again")

    def check_fits(self, model: nn.Module, variant: str) -> None:
        """Raise `UserError` unless this store holds every linear of the model, which may be on the device "meta"."""
        ops = dict(enumerate(map(_shapes, linears_by_layer(model, None))))
        self.check_holds(model, variant, ops, linear_weights(model))

    def check_holds(
        self,
        model: nn.Module,
        variant: str,
        ops: Mapping[int, Mapping[str, tuple[int, ...]]],
        weights: Iterable[Tensor],
    ) -> None:
        """Raise `UserError` unless this store holds these ops by layer, which are the `weights`, and all else beside.

        A head that is cut into parts has layers of its own. Types need not be the same, but integers stay integers.
        """
        rows = self.head_rows
        parts = enumerate(head_parts(model, rows) if rows else (), len(decoder_blocks(model)))
        ops = {**ops, **{layer: _shapes({HEAD: part}) for layer, part in parts}}
        rest = tensors_beside(model, [*weights, model.get_output_embeddings().weight] if rows else weights)
        stored = (run for layer in self.layers_of(variant) for run in layer.ops.values())
        has = {f"layer {run.layer} {run.op}": run.shape for run in stored}
        wants = {f"layer {layer} {name}": shape for layer, shapes in ops.items() for name, shape in shapes.items()}
        has |= {run.name: run.pieces[run.name].shape for run in self.index.rest}
        wants |= {name: tuple(tensor.shape) for name, tensor in rest.items()}
        for name in [*wants, *has]:
            if has.get(name) != wants.get(name):
                raise self._misfit(model, f"{name} of shape {has.get(name)}", wants.get(name))
        for run in self.index.rest:
            kind, wanted = run.pieces[run.name].dtype, rest[run.name].dtype
            if kind.is_floating_point != wanted.is_floating_point:
                raise self._misfit(model, f"{run.name} of {kind}", wanted)

    def _misfit(self, model: nn.Module, has: str, wants: object) -> UserError:
        return UserError(
            f"{self.folder} was packed from another model ({line(self.model.get('name', 'unnamed'))}): it has {has}; "
            f"{type(model).__name__} needs {wants}"
        )


def _shapes(linears: Mapping[str, nn.Linear]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(linear.weight.shape) for name, linear in linears.items()}


def _shard(path: Path, nbytes: int, runs: Iterable[BlockRun]) -> StoredFile:
    try:
        file = StoredFile.of(path, partial(_holds, path, runs))
    except OSError as error:
        raise FormatError(f"{path}: cannot be read, though the index names it: {error.strerror}") from error
    if file.identity.size_bytes != nbytes:
        raise FormatError(f"{path}: {file.identity.size_bytes} bytes; the index says {nbytes}; pack the model again")
    return file


def _holds(path: Path, runs: Iterable[BlockRun]) -> bool:
    """Whether a file holds these runs, by their checksums. Raises `OSError`."""
    return all(_sha256(_parts(run, partial(uncached, path))) == run.sha256 for run in runs)


def _parts(run: BlockRun, read: Callable[[int, int], np.ndarray]) -> Iterator[np.ndarray]:
    """The bytes of a run, a few at a time; `read` takes an offset and a size."""
    for start in range(run.offset, end := run.offset + run.nbytes, VERIFY_BYTES):
        yield read(start, min(VERIFY_BYTES, end - start))


def _sha256(parts: Iterable[np.ndarray]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()

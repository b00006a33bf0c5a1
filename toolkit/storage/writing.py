"""Writing a store: a folder of shards, an index, and the other files that the model needs.

ops = (Op(layer, name, "endor", encode("endor", weight)) for layer, name, weight in weights)
write_store(folder, ops, rest=other_tensors, model={"name": "smollm2-135m"})
"""

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Self

from torch import Tensor

from toolkit.errors import UserError
from toolkit.files import check_space, file_sha256, new_folder, path_of
from toolkit.formats import Packed
from toolkit.models.on_demand import Rows
from toolkit.storage import index
from toolkit.storage.direct import uncached
from toolkit.storage.index import MODEL_FOLDER, Index, Shard
from toolkit.storage.runs import OpRun, RestRun
from toolkit.storage.shards import PADDING, BlockRun, layout, write_shard
from toolkit.storage.unfinished import Unfinished

Check = Callable[[OpRun, Packed], None]
VARIANT = r"[a-z0-9_-]+"
REST_BYTES = 256 << 20  # a shard of other tensors holds at most this much, or one larger tensor


@dataclass(frozen=True, eq=False)
class Op:
    """A linear layer's weight in one variant, for `write_store`.

    `op` is the linear's dotted name inside its decoder block. `variant` names the treatment ("endor", "int8-zstd"); a
    layer and op can have each variant once. `extras` are tensors that are read with the weight, such as scales.
    """

    layer: int
    op: str
    variant: str
    packed: Packed
    extras: Mapping[str, Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, layer: int, op: str, variant: str, weight: Packed) -> Self:
        """A packed weight with its own extras, such as the scales of int8 weights."""
        return cls(layer, op, variant, weight.stored, weight.extras)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """All stored tensors, by name."""
        return {**self.packed.tensors, **self.extras}


def write_store(
    folder: Path,
    ops: Iterable[Op],
    rest: Iterable[tuple[str, Tensor | Rows]] = (),
    model: Mapping[str, object] | None = None,
    files: Callable[[Path], None] | None = None,
    expected_bytes: int = 0,
) -> None:
    """Write a store into a new folder. If anything fails, nothing is left behind.

    Args:
        folder: must not exist; the folder above it must.
        ops: the ops of one layer and variant follow each other. They become one shard, and are held in memory together.
        rest: names and tensors that are no op's weight.
        model: facts about the model for users, as plain JSON; error messages use its `name`.
        files: fills the folder `model/` of the store with small files (configuration, tokenizer).
        expected_bytes: the disk must have this much space before anything is written; 0 if it is not known.

    Raises `UserError` as `new_folder` does, if there is too little space, or if ops come in another order.
    """
    layers = (list(group) for _, group in groupby(ops, key=lambda op: (op.layer, op.variant)))
    write_layers(folder, layers, rest, lambda: model or {}, files, expected_bytes)


def write_layers(
    folder: Path,
    layers: Iterable[list[Op]],
    rest: Iterable[tuple[str, Tensor | Rows]],
    model: Callable[[], Mapping[str, object]],
    files: Callable[[Path], None] | None = None,
    expected_bytes: int = 0,
    unfinished: Unfinished | None = None,
    check: Check | None = None,
) -> None:
    """As `write_store`, with the ops of one layer and variant in each list; `model` is called when all are written.

    A list is emptied as soon as it is written.

    Layers that `unfinished` holds are part of the store. The others are written there, too, and stay. `check` gets each
    op as the file holds it, before the next list is asked for.
    """
    with new_folder(path_of(folder)) as partial:
        check_space(partial, max(0, expected_bytes - (unfinished.nbytes if unfinished else 0)))
        shards = _Shards(partial, unfinished)
        op_runs = _write_ops(shards, layers, check)
        rest_runs = _write_rest(shards, rest)
        small = _write_files(partial, files)
        contents = Index(dict(model()), small, tuple(shards.written.values()), op_runs, rest_runs)
        index.write(contents, partial / index.FILE)


class _Shards:
    """The shards written so far."""

    def __init__(self, folder: Path, unfinished: Unfinished | None):
        self.folder, self.unfinished = folder, unfinished
        self.written: dict[str, Shard] = {}

    def add(
        self, file: str, groups: list[Mapping[str, Tensor | Rows]], prefixes: list[str], variant: str, folder: Path
    ) -> list[BlockRun]:
        if file in self.written:
            raise UserError(f"{file} would be written twice: ops of one layer and variant must follow each other")
        nbytes = sum(layout(tensors)[1] for tensors in groups)
        check_space(folder, nbytes)
        header, *runs = write_shard(folder / file, groups, prefixes, {"variant": variant})
        self.written[file] = Shard(file, header.nbytes + nbytes, header.nbytes, header.sha256)
        return runs


def _write_ops(shards: _Shards, layers: Iterable[list[Op]], check: Check | None) -> tuple[OpRun, ...]:
    runs: list[OpRun] = []
    unfinished, folder = shards.unfinished, shards.folder
    if unfinished is not None:
        folder = unfinished.folder
        for shard, written in unfinished.noted():
            shards.written[shard.file] = shard
            runs += written
    for group in layers:
        file = f"layer-{group[0].layer:03d}.{group[0].variant}.safetensors"
        written = tuple(_write_layer(shards, file, group, folder))
        group.clear()  # generators and their wrappers, such as `torch.no_grad`, hold the list until they give the next
        if check is not None:
            _check_written(folder / file, written, check)
        if unfinished is not None:
            unfinished.note(shards.written[file], written)
        runs += written
    for file in shards.written if unfinished is not None else ():
        os.link(folder / file, shards.folder / file)
    return tuple(runs)


def _write_layer(shards: _Shards, file: str, group: list[Op], folder: Path) -> Iterator[OpRun]:
    _check_group(group)
    prefixes = [f"{op.op}." for op in group]
    written = shards.add(file, [op.tensors for op in group], prefixes, group[0].variant, folder)
    for op, place in zip(group, written, strict=True):
        pieces, packed = layout(op.tensors)[0], op.packed
        yield OpRun(
            **vars(place),
            layer=op.layer,
            op=op.op,
            variant=op.variant,
            format=packed.name,
            format_version=packed.version,
            dtype=packed.dtype,
            shape=tuple(packed.shape),
            pieces={name: pieces[name] for name in packed.tensors},
            extras={name: pieces[name] for name in op.extras},
        )


def _check_written(path: Path, runs: Iterable[OpRun], check: Check) -> None:
    """Read ops back, one after the other."""
    for run in runs:
        check(run, run.view(uncached(path, run.offset, run.nbytes)))


def _check_group(group: list[Op]) -> None:
    if not re.fullmatch(VARIANT, group[0].variant):
        raise UserError(f"variant {group[0].variant!r}: expected small letters, digits, '-' and '_'; it names files")
    names = [op.op for op in group]
    if twice := {name for name in names if names.count(name) > 1}:
        raise UserError(f"layer {group[0].layer}, variant {group[0].variant!r}: {min(twice)} comes twice")
    for op in group:
        if both := op.extras.keys() & op.packed.tensors.keys():
            raise UserError(f"layer {op.layer} {op.op}: extras {sorted(both)} are names of the format's own tensors")


def _write_rest(shards: _Shards, rest: Iterable[tuple[str, Tensor | Rows]]) -> tuple[RestRun, ...]:
    runs = []
    for number, batch in enumerate(_batches(rest)):
        file = f"rest-{number:03d}.safetensors"
        groups = [{name: tensor} for name, tensor in batch.items()]
        written = shards.add(file, groups, [""] * len(groups), "rest", shards.folder)
        for group, place in zip(groups, written, strict=True):
            runs.append(RestRun(**vars(place), name=next(iter(group)), pieces=layout(group)[0]))
        del batch, groups, group  # gone before the next
    return tuple(runs)


def _batches(rest: Iterable[tuple[str, Tensor | Rows]]) -> Iterator[dict[str, Tensor | Rows]]:
    batch, nbytes, names = {}, 0, set()
    for name, tensor in rest:
        if name in names or name.startswith(PADDING):
            raise UserError(f"tensor {name!r} comes twice, or has a name that the store uses itself")
        if batch and nbytes + tensor.nbytes > REST_BYTES:
            yield batch
            batch, nbytes = {}, 0
        names.add(name)
        batch[name], nbytes = tensor, nbytes + tensor.nbytes
        del tensor
        if nbytes > REST_BYTES:  # the next one may be large, too
            yield batch
            batch, nbytes = {}, 0
    if batch:
        yield batch


def _write_files(partial: Path, files: Callable[[Path], None] | None) -> dict[str, str]:
    if files is None:
        return {}
    (partial / MODEL_FOLDER).mkdir()
    files(partial / MODEL_FOLDER)
    written = sorted(path for path in (partial / MODEL_FOLDER).rglob("*") if path.is_file())
    return {path.relative_to(partial).as_posix(): file_sha256(path) for path in written}

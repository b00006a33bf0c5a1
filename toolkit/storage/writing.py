"""Writing a store: a folder of shards, an index, and what else the model needs; all of it, or nothing.

    ops = (Op(layer, name, "endor", encode("endor", weight)) for layer, name, weight in weights)
    write_store(folder, ops, rest=other_tensors, model={"name": "smollm2-135m"})

The folder appears under its name once the disk has everything. Until then it is called `.<name>.partial`; an error or
Ctrl-C removes that, and what a killed process left of it goes when the same name is next written.
"""

import contextlib
import fcntl
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

from torch import Tensor

from toolkit.cache import disk_full, file_sha256
from toolkit.errors import UserError
from toolkit.formats import Packed
from toolkit.storage import index
from toolkit.storage.index import MODEL_FOLDER, Index
from toolkit.storage.runs import OpRun, RestRun, Run
from toolkit.storage.shards import PADDING, Shard, layout, write_shard

REST_BYTES = 256 << 20  # of other tensors held at once, which is also the most a shard of them holds, but for one
SPARE_BYTES = 16 << 20  # left free beside what is written


@dataclass(frozen=True, eq=False)
class Op:
    """A linear layer's weight in one variant, for `write_store`.

    `op` is the linear's dotted name inside its decoder block; `variant` names the treatment ("endor", "int8-zstd"): of
    each layer and op it can be there once. `extras` are tensors that are read with the weight, such as scales.
    """

    layer: int
    op: str
    variant: str
    packed: Packed
    extras: Mapping[str, Tensor] = field(default_factory=dict)


def write_store(
    folder: Path,
    ops: Iterable[Op],
    rest: Iterable[tuple[str, Tensor]] = (),
    model: Mapping[str, object] | None = None,
    files: Callable[[Path], None] | None = None,
    expected_bytes: int = 0,
) -> None:
    """Write a store into a new folder.

    Args:
        folder: must not exist; the folder above it must.
        ops: those of one layer and variant one after the other; they become one shard. That much is held in memory.
        rest: names and tensors that are no op's weight.
        model: what is worth knowing of the model, as plain JSON; `name` is what errors call it.
        files: fills a folder, `model/` in the store, with small files (configuration, tokenizer).
        expected_bytes: asked of the disk before anything is written; what is known of the sum.

    Raises `UserError` if the folder is there already or is just being written, if the disk is or gets full, or if ops
    come in another order. Nothing is left behind then.
    """
    folder = Path(folder)
    _check_target(folder)
    with _partial(folder) as partial, _told_when_full(folder):
        _check_space(partial, expected_bytes)
        contents = _write_parts(partial, ops, rest)
        contents = Index(dict(model or {}), _write_files(partial, files), **contents)
        index.write(contents, partial / index.FILE)
        _sync(partial)
        _check_target(folder)
        os.replace(partial, folder)
        _sync_path(folder.parent)


def _write_parts(partial: Path, ops: Iterable[Op], rest: Iterable[tuple[str, Tensor]]) -> dict:
    shards, headers, op_runs, rest_runs = {}, [], [], []

    def write(file: str, groups: list[dict[str, Tensor]], prefixes: list[str], metadata: dict[str, str]) -> Shard:
        if file in shards:
            raise UserError(f"{file} would be written twice: ops of one layer and variant must follow each other")
        nbytes = sum(layout(tensors)[1] for tensors in groups)
        _check_space(partial, nbytes)
        written = write_shard(partial / file, groups, prefixes, metadata)
        shards[file] = written.header.nbytes + nbytes
        headers.append(Run(file, **vars(written.header)))
        return written

    for (layer, variant), grouped in groupby(ops, key=lambda op: (op.layer, op.variant)):
        group, file = list(grouped), f"layer-{layer:03d}.{variant}.safetensors"
        _check_group(group)
        written = write(file, [_tensors(op) for op in group], [f"{op.op}." for op in group], {"variant": variant})
        op_runs += [_op_run(op, file, run) for op, run in zip(group, written.groups, strict=True)]
    for number, batch in enumerate(_batches(rest)):
        file = f"rest-{number:03d}.safetensors"
        written = write(file, [{name: tensor} for name, tensor in batch.items()], [""] * len(batch), {})
        for (name, tensor), run in zip(batch.items(), written.groups, strict=True):
            rest_runs.append(RestRun(file, **vars(run), name=name, pieces=layout({name: tensor})[0]))
    return {"shards": shards, "headers": tuple(headers), "ops": tuple(op_runs), "rest": tuple(rest_runs)}


def _tensors(op: Op) -> dict[str, Tensor]:
    return {**op.packed.tensors, **op.extras}


def _op_run(op: Op, file: str, run) -> OpRun:
    pieces, _ = layout(_tensors(op))
    return OpRun(
        file,
        **vars(run),
        layer=op.layer,
        op=op.op,
        variant=op.variant,
        format=op.packed.name,
        format_version=op.packed.version,
        dtype=op.packed.dtype,
        shape=tuple(op.packed.shape),
        pieces={name: pieces[name] for name in op.packed.tensors},
        extras={name: pieces[name] for name in op.extras},
    )


def _check_group(group: list[Op]) -> None:
    if not re.fullmatch(index.VARIANT, group[0].variant):
        raise UserError(f"variant {group[0].variant!r}: expected small letters, digits, '-' and '_'; it names files")
    names = [op.op for op in group]
    if twice := {name for name in names if names.count(name) > 1}:
        raise UserError(f"layer {group[0].layer}, variant {group[0].variant!r}: {min(twice)} comes twice")
    for op in group:
        if both := op.extras.keys() & op.packed.tensors.keys():
            raise UserError(f"layer {op.layer} {op.op}: extras {sorted(both)} are names of the format's own tensors")


def _batches(rest: Iterable[tuple[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    batch, nbytes, names = {}, 0, set()
    for name, tensor in rest:
        if name in names or name.startswith(PADDING):
            raise UserError(f"tensor {name!r} comes twice, or has a name that the store uses itself")
        if batch and nbytes + tensor.nbytes > REST_BYTES:
            yield batch
            batch, nbytes = {}, 0
        names.add(name)
        batch[name], nbytes = tensor, nbytes + tensor.nbytes
    if batch:
        yield batch


def _write_files(partial: Path, files: Callable[[Path], None] | None) -> dict[str, str]:
    if files is None:
        return {}
    (partial / MODEL_FOLDER).mkdir()
    files(partial / MODEL_FOLDER)
    written = sorted(path for path in (partial / MODEL_FOLDER).rglob("*") if path.is_file())
    return {path.relative_to(partial).as_posix(): file_sha256(path) for path in written}


def _check_target(folder: Path) -> None:
    if not folder.parent.is_dir():
        raise UserError(f"no folder {folder.parent} to write {folder.name} into: make it, or name another")
    if folder.exists() or folder.is_symlink():
        raise UserError(f"{folder} exists already: name a new folder, or remove it first")


@contextlib.contextmanager
def _partial(folder: Path) -> Iterator[Path]:
    """An empty folder beside `folder` that no other process writes to; gone afterwards unless it was renamed."""
    partial = folder.with_name(f".{folder.name}.partial")
    with _locked(partial, folder):
        try:
            for left in partial.iterdir():  # by a process that was killed
                shutil.rmtree(left) if left.is_dir() else left.unlink()
            yield partial
        finally:
            shutil.rmtree(partial, ignore_errors=True)


@contextlib.contextmanager
def _locked(partial: Path, folder: Path) -> Iterator[None]:
    """Lock the folder itself, so that no lock file is left; whoever dies lets go."""
    try:
        partial.mkdir(exist_ok=True)
    except PermissionError as error:
        raise UserError(f"cannot write to {folder.parent}: name a folder in a writable place") from error
    descriptor = os.open(partial, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        held = os.fstat(descriptor).st_ino == _inode(partial)  # else its writer finished in between, and renamed it
    except BlockingIOError:
        held = False
    try:
        if not held:
            raise UserError(f"{folder} is being written by another process: wait for it, or name another folder")
        yield
    finally:
        os.close(descriptor)


def _inode(path: Path) -> int | None:
    with contextlib.suppress(FileNotFoundError):
        return path.stat().st_ino
    return None


@contextlib.contextmanager
def _told_when_full(folder: Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        if disk_full(error) and not isinstance(error, UserError):
            raise UserError(f"no space left for {folder}: free some, or name a folder on a larger disk") from error
        raise


def _check_space(partial: Path, nbytes: int) -> None:
    free = shutil.disk_usage(partial).free
    if free < nbytes + SPARE_BYTES:
        raise UserError(
            f"no space left in {partial.parent}: {nbytes / 1e6:.0f} MB more are needed and {free / 1e6:.0f} MB free; "
            "free some, or name a folder on a larger disk"
        )


def _sync(partial: Path) -> None:
    """Wait until the disk has the index, the small files and the folders; shards were waited for as they were made."""
    for path in partial.rglob("*"):
        if path.suffix != ".safetensors":
            _sync_path(path)
    _sync_path(partial)


def _sync_path(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

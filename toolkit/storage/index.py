"""The index of a store: one JSON file that says what lies where.

It has a version and its own SHA-256, and the SHA-256 of every run of every shard. So any flipped bit is found. Reads
stay within the shards, whatever the index says, and names of files stay within the folder.
"""

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field

from toolkit.errors import unknown
from toolkit.formats import READABLE, FormatError
from toolkit.records import adapter, checked, line, load_json
from toolkit.storage.direct import BLOCK_BYTES
from toolkit.storage.runs import OpRun, RestRun, views
from toolkit.storage.shards import BlockRun

VERSION = 1
FILE = "index.json"
MODEL_FOLDER = "model"  # configuration and tokenizer

SMALL_FILE = Annotated[str, Field(pattern=rf"^{MODEL_FOLDER}(/\.*[^/.\\\x00-\x1f][^/\\\x00-\x1f]*)+$")]
SHARD_FILE = Annotated[str, Field(pattern=r"^[a-z0-9][A-Za-z0-9._-]*\.safetensors$")]


@dataclass(frozen=True)
class Shard:
    """A file of runs, and its header."""

    file: SHARD_FILE
    nbytes: int
    header_bytes: int
    header_sha256: str

    @property
    def header(self) -> BlockRun:
        """The blocks before the first run."""
        return BlockRun(self.file, 0, self.header_bytes, self.header_sha256)


@dataclass(frozen=True)
class Index:
    """The contents of a store. `files` are the small files beside the shards (configuration, tokenizer)."""

    model: dict[str, Any]
    files: dict[SMALL_FILE, str]
    shards: tuple[Shard, ...]
    ops: tuple[OpRun, ...]
    rest: tuple[RestRun, ...]
    version: int = field(default=VERSION, kw_only=True)

    @property
    def runs(self) -> tuple[BlockRun, ...]:
        """All runs of all shards."""
        return (*(shard.header for shard in self.shards), *self.ops, *self.rest)


def write(index: Index, path: Path) -> None:
    """Write an index into a temporary folder: writing is not one step, so a reader could see half of it."""
    record = adapter(Index).dump_python(index)
    path.write_text(json.dumps(record | {"sha256": digest(record)}, indent=1) + "\n", encoding="utf-8")


def read(path: Path) -> Index:
    """Read an index. Raises `FormatError`, which names the file and the fault."""
    record = load_json(path, FormatError, "no index of a store")
    version = record.get("version") if isinstance(record, dict) else None
    if version != VERSION:
        raise FormatError(f"{path}: version {version!r} of the index; this code reads {VERSION}: pack the model again")
    if record.pop("sha256", None) != digest(record):
        raise FormatError(f"{path}: damaged: its contents do not match their checksum; pack the model again")
    index = checked(record, Index, path, FormatError, strict=False)
    sizes = {shard.file: shard.nbytes for shard in index.shards}
    for run in index.runs:
        if run.offset % BLOCK_BYTES or run.nbytes % BLOCK_BYTES or not 0 <= run.offset <= run.offset + run.nbytes:
            raise FormatError(f"{path}: {run.label}: bytes {run.offset} to {run.offset + run.nbytes}: no whole blocks")
        if run.offset + run.nbytes > sizes.get(run.shard, 0):
            raise FormatError(f"{path}: {run.label}: it ends beyond its shard {run.shard}")
    try:
        for run in index.ops:
            _check_format(run)
            run.view(torch.empty(run.nbytes, dtype=torch.uint8, device="meta"))  # types and shapes, without memory
        for run in index.rest:
            views(run.pieces, torch.empty(run.nbytes, dtype=torch.uint8, device="meta"))[run.name]
    except (FormatError, RuntimeError, KeyError) as error:
        raise FormatError(f"{path}: {line(error)}") from error
    return index


def digest(record: dict) -> str:
    """The SHA-256 of a record without its own."""
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def _check_format(run: OpRun) -> None:
    if run.format not in READABLE:
        raise FormatError(f"{run.label}: {unknown('format', run.format, READABLE)}")
    if run.format_version != (version := READABLE[run.format].version):
        raise FormatError(f"{run.label}: {run.format} version {run.format_version}; this code reads {version}")

"""The index of a store: one JSON file that says what lies where. It is checked before it is used.

Every byte of every shard belongs to exactly one run: a header, an op, or a tensor that belongs to no op. Every run has
its SHA-256, and the index has its own. So any flipped bit is found. A checksum says nothing about who wrote the index:
every number in it is bounded before it is used.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import Field

from toolkit.errors import unknown
from toolkit.formats import READABLE, FormatError
from toolkit.formats.packed import DTYPES as FORMAT_DTYPES
from toolkit.records import checked, load_json, mapping
from toolkit.storage.direct import BLOCK_BYTES
from toolkit.storage.runs import BlockRun, OpRun, RestRun, in_order
from toolkit.storage.shards import DTYPES, TENSOR_BYTES, Piece

VERSION = 1
FILE = "index.json"
MODEL_FOLDER = "model"  # configuration and tokenizer

NAMES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES}
LARGEST = 1 << 62  # number in an index; sums of two fit into 64 bits
SIZE = Annotated[int, Field(ge=0, le=LARGEST)]


def _text(pattern: str) -> Any:
    """Text that a pattern describes; it ends in `\\Z`, since `$` lets a newline follow."""
    return Annotated[str, Field(pattern=pattern)]


SHA256 = _text(r"^[0-9a-f]{64}\Z")
SMALL_FILE = _text(rf"^{MODEL_FOLDER}(/(?!\.\.?(/|\Z))[^/\\\x00-\x1f\x7f]+)+\Z")
NAME = _text(r"^[^\x00-\x1f\x7f-\x9f\u2028\u2029]+\Z")
FILE_NAME = _text(r"^[a-z0-9][A-Za-z0-9._-]*\.safetensors\Z")
VARIANT = r"^[a-z0-9_-]+\Z"
SHAPE = Annotated[list[SIZE], Field(max_length=8)]
RUN = {"shard": FILE_NAME, "offset": SIZE, "nbytes": SIZE, "sha256": SHA256}
PIECE = mapping("piece", {"dtype": Literal[*NAMES], "shape": SHAPE, "offset": SIZE})
PIECES: Any = dict[NAME, PIECE]  # type: ignore[valid-type]  # made at run time
OP = {
    "layer": SIZE,
    "op": NAME,
    "variant": _text(VARIANT),
    "format": str,
    "format_version": int,
    "dtype": Literal[*FORMAT_DTYPES],
    "shape": Annotated[list[SIZE], Field(min_length=2, max_length=2)],
    "pieces": PIECES,
    "extras": PIECES,
}
SHARD = {"file": FILE_NAME, "nbytes": SIZE, "header_bytes": SIZE, "header_sha256": SHA256}
RECORD = mapping(
    "index",
    {
        "version": Literal[VERSION],
        "model": dict[str, Any],
        "files": dict[SMALL_FILE, SHA256],  # type: ignore[valid-type]  # made at run time
        "shards": list[mapping("shard", SHARD)],
        "ops": list[mapping("op", RUN | OP)],
        "rest": list[mapping("rest", RUN | {"name": NAME, "pieces": PIECES})],
        "sha256": SHA256,
    },
)


@dataclass(frozen=True)
class Index:
    """The contents of a store. `files` are the small files beside the shards (configuration, tokenizer)."""

    model: dict
    files: dict[str, str]
    shards: dict[str, int]  # file name -> bytes
    headers: tuple[BlockRun, ...]
    ops: tuple[OpRun, ...]
    rest: tuple[RestRun, ...]

    @property
    def runs(self) -> tuple[BlockRun, ...]:
        """All runs of all shards."""
        return (*self.headers, *self.ops, *self.rest)


def write(index: Index, path: Path) -> None:
    """Write an index into a temporary folder: writing is not one step, so a reader could see half of it."""
    record = {
        "version": VERSION,
        "model": index.model,
        "files": index.files,
        "shards": [_shard(run, index.shards[run.shard]) for run in index.headers],
        "ops": [_plain(run) for run in index.ops],
        "rest": [_plain(run) for run in index.rest],
    }
    path.write_text(json.dumps(record | {"sha256": _digest(record)}, indent=1) + "\n", encoding="utf-8")


def read(path: Path) -> Index:
    """Read an index and check that it is consistent. Raises `FormatError`, which names the file and the fault."""
    record = load_json(path, FormatError, "no index of a store")
    _check_record(record, path)
    index = _index(record)
    for run in index.ops:
        _check_format(run, path)
        _check_pieces(run, path)
        _check_weight(run, path)
    for run in index.rest:
        _check_name(run, path)
        _check_pieces(run, path)
    _check_tiling(index, path)
    _check_layers(index, path)
    return index


def _check_record(record: Any, path: Path) -> None:
    version = record.get("version") if isinstance(record, dict) else None
    if version != VERSION:
        raise FormatError(f"{path}: version {version!r} of the index; this code reads {VERSION}: pack the model again")
    checked(record, RECORD, path, FormatError)
    if record.pop("sha256") != _digest(record):
        raise FormatError(f"{path}: damaged: its contents do not match their checksum; pack the model again")


def _index(record: dict) -> Index:
    shards = {shard["file"]: shard["nbytes"] for shard in record["shards"]}
    headers = tuple(BlockRun(s["file"], 0, s["header_bytes"], s["header_sha256"]) for s in record["shards"])
    ops = tuple(OpRun(**_parsed(run)) for run in record["ops"])
    rest = tuple(RestRun(**_parsed(run)) for run in record["rest"])
    return Index(record["model"], record["files"], shards, headers, ops, rest)


def _check_name(run: RestRun, path: Path) -> None:
    if [*run.pieces] != [run.name]:
        raise FormatError(f"{path}: {run.name} holds {sorted(run.pieces)}; expected itself alone")


def _check_format(run: OpRun, path: Path) -> None:
    if run.format not in READABLE:
        raise FormatError(f"{path}: {run.label}: {unknown('format', run.format, READABLE)}")
    if run.format_version != (version := READABLE[run.format].version):
        raise FormatError(
            f"{path}: {run.label}: {run.format} version {run.format_version}; this code reads {version}: pack again"
        )


def _check_pieces(run: OpRun | RestRun, path: Path) -> None:
    pieces = [*run.pieces.values(), *getattr(run, "extras", {}).values()]
    in_line = sorted(pieces, key=lambda piece: (piece.offset, piece.end))
    if any(prod(max(size, 1) for size in piece.shape) > LARGEST // piece.dtype.itemsize for piece in pieces):
        raise FormatError(f"{path}: {run.label}: a shape of more than {LARGEST} bytes")
    for before, piece in pairwise([Piece(torch.uint8, (0,), 0), *in_line]):
        if piece.offset < before.end or piece.offset % TENSOR_BYTES or piece.end > run.nbytes:
            raise FormatError(f"{path}: {run.label}: its tensors overlap, are out of line or exceed {run.nbytes} bytes")


def _check_weight(run: OpRun, path: Path) -> None:
    """The tensors make a weight of the format: stand-ins without memory have their types and shapes."""
    try:
        run.view(torch.empty(run.nbytes, dtype=torch.uint8, device="meta"))
    except FormatError as error:
        raise FormatError(f"{path}: {error}") from error


def _check_tiling(index: Index, path: Path) -> None:
    """The runs of each shard are whole blocks and follow each other without a gap from its first byte to its last."""
    ends = dict.fromkeys(index.shards, 0)
    for run in sorted(index.runs, key=in_order):
        if run.shard not in ends:
            raise FormatError(f"{path}: {run.label}: its shard {run.shard} is not listed")
        if run.offset != ends[run.shard] or run.nbytes % BLOCK_BYTES:
            raise FormatError(
                f"{path}: {run.label}: bytes {run.offset} to {run.offset + run.nbytes} of {run.shard} overlap others, "
                f"leave a hole or are no blocks of {BLOCK_BYTES}; expected a start at {ends[run.shard]}"
            )
        ends[run.shard] = run.offset + run.nbytes
    for shard, nbytes in index.shards.items():
        if ends[shard] != nbytes:
            raise FormatError(f"{path}: {shard} has {nbytes} bytes, but its parts {ends[shard]}")


def _check_layers(index: Index, path: Path) -> None:
    """No op is listed twice, and the ops of a layer and variant adjoin in one shard."""
    seen, last = set(), {}
    for run in sorted(index.ops, key=in_order):
        before = last.get((run.layer, run.variant), run)
        adjoins = before is run or (before.shard, before.offset + before.nbytes) == (run.shard, run.offset)
        if (run.layer, run.op, run.variant) in seen or not adjoins:
            raise FormatError(f"{path}: {run.label}: is there twice, or lies apart from the other ops of its layer")
        seen.add((run.layer, run.op, run.variant))
        last[run.layer, run.variant] = run


def _shard(header: BlockRun, nbytes: int) -> dict:
    return {"file": header.shard, "nbytes": nbytes, "header_bytes": header.nbytes, "header_sha256": header.sha256}


def _plain(part: OpRun | RestRun | Piece) -> dict:
    return {key: _plain_value(value) for key, value in vars(part).items()}


def _plain_value(value: object) -> object:
    if isinstance(value, Mapping):
        return {name: _plain(piece) for name, piece in value.items()}
    if isinstance(value, tuple):
        return list(value)
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else value


def _parsed(record: dict) -> dict:
    parsed = dict(record)
    for key in ("pieces", "extras"):
        if key in record:
            parsed[key] = {name: Piece(**_typed(piece)) for name, piece in record[key].items()}
    return _typed(parsed) if "dtype" in parsed else parsed


def _typed(record: dict) -> dict:
    return record | {"dtype": NAMES[record["dtype"]], "shape": tuple(record["shape"])}


def _digest(record: dict) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()

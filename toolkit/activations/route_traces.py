"""Routing traces in the format `route_trace v1` of BigMoeOnEdge, and the three of real models in `data/route_traces`.

    routing = load_route_trace("qwen3-30b-a3b")
    routing.trace.active(0), routing.decoding

The file is text, as it is or compressed with xz: header lines that begin with #, then comma-separated columns.
"""

import lzma
import os
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Self

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Int64

from toolkit import files, paths
from toolkit.activations.trace import Trace, pack
from toolkit.errors import UserError, unknown
from toolkit.records import read_regular

FORMAT = "# route_trace v1"
HEAD = ("model", "arch", "n_layer", "n_expert", "n_expert_used")
BY_LAYER = ("layer", "expert_bytes", "dense_bytes")
COLUMNS = ("turn", "phase", "step", "layer", "slot", "expert", "weight", "residency", "expert_bytes")
LIMIT_BYTES = 64 << 20  # of the text
LIMIT_WEIGHTS = 1 << 28  # tokens × layers × experts
ROUTE_TRACES = {  # the experts a token that the model was trained with; these files have fewer
    "qwen3-30b-a3b": 8,
    "gemma-4-26b-a4b": 8,
    "gpt-oss-120b": 4,
}
UNKNOWN_TOKEN = -1  # these files do not say which tokens they are of


@dataclass(frozen=True, eq=False)
class RouteTrace:
    """A routing trace with what the format says beside it.

    Args:
        trace: of one sequence, all turns one after the other, whose token ids are unknown (-1).
        turn: of each token, the turn of the conversation that it belongs to.
        decoding: of each token, whether it was decoded; else it is of a prompt.
        per_token: experts that a token uses in each layer.
        expert_bytes: of one expert of each layer.
        dense_bytes: of what else a layer has.
        architecture: as llama.cpp names it.

    Raises `UserError` for parts that do not fit each other.
    """

    trace: Trace
    turn: Int64[np.ndarray, " tokens"]
    decoding: Bool[np.ndarray, " tokens"]
    per_token: int
    expert_bytes: tuple[int, ...]
    dense_bytes: tuple[int, ...]
    architecture: str

    def __post_init__(self):
        """Refuse parts of another number of tokens or layers."""
        tokens, layers = self.trace.tokens.shape[1], self.trace.layers
        if self.trace.tokens.shape[0] != 1 or self.trace.unit != "expert" or self.trace.weights is None:
            raise UserError("a route trace has one sequence of experts with their weights")
        if len(set(self.trace.units)) != 1:
            raise UserError(f"a route trace has as many experts in each layer: {self.trace.units}")
        if (len(self.turn), len(self.decoding)) != (tokens, tokens):
            raise UserError(f"{len(self.turn)} turns and {len(self.decoding)} phases of {tokens} tokens")
        if (len(self.expert_bytes), len(self.dense_bytes)) != (layers, layers):
            raise UserError(f"bytes of {len(self.expert_bytes)} and {len(self.dense_bytes)} layers of {layers}")

    @classmethod
    def of(cls, trace: Trace, expert_bytes: int, dense_bytes: int = 0, prompt: int = 0, architecture: str = "") -> Self:
        """A trace that was recorded here: each sequence is a turn, and its first tokens are its `prompt`.

        Raises `UserError` for a trace without weights, or whose tokens use different numbers of experts.
        """
        counts = {int(n) for layer in range(trace.layers) for n in trace.active(layer).sum(-1).unique()}
        if len(counts) != 1 or trace.weights is None:
            raise UserError(f"tokens use {sorted(counts)} experts: expected one number, and a trace with weights")
        turns, length = trace.tokens.shape
        flat = Trace(
            trace.model, trace.corpus, trace.tokens.reshape(1, -1), trace.units,
            tuple(each.reshape(1, turns * length, -1) for each in trace.bits), "expert", None,
            tuple(each.reshape(1, turns * length, -1) for each in trace.weights),
        )  # fmt: skip
        decoding = np.tile(np.arange(length) >= prompt, turns)
        sizes = (expert_bytes,) * trace.layers, (dense_bytes,) * trace.layers
        return cls(flat, np.repeat(np.arange(turns), length), decoding, counts.pop(), *sizes, architecture)


def route_trace_file(name: str) -> Path:
    """The file of one of `ROUTE_TRACES`. Raises `UserError` for another name."""
    if name not in ROUTE_TRACES:
        raise unknown("route trace", name, ROUTE_TRACES)
    return paths.root() / "data" / "route_traces" / f"{name}.csv.xz"


def load_route_trace(name: str) -> RouteTrace:
    """One of `ROUTE_TRACES`. Raises `UserError` for another name, and as `read_route_trace` does."""
    return read_route_trace(route_trace_file(name))


def read_route_trace(path: str | os.PathLike) -> RouteTrace:
    """Read a file, compressed with xz if its name ends so.

    A token may lack a layer (of a prompt, the last layer often computes the last token alone); it then uses no expert
    there. Raises `UserError`, which names the file, for one that cannot be read, is damaged, of another version, or
    says what cannot be: an expert beyond the router, a slot twice, numbers that are none.
    """
    path = Path(path)
    lines = _text(path).split("\n")
    head = [line for line in lines if line.startswith("#")]
    about, by_layer = _header(head, path)
    table = _table("\n".join(lines[len(head) :]), path)
    return _assembled(table, about, by_layer, path)


def write_route_trace(path: str | os.PathLike, routing: RouteTrace) -> None:
    """Write a file, compressed with xz if its name ends so. Slots fall by weight; nothing was resident, all was read.

    Raises `UserError` for trouble with the disk.
    """
    trace, experts = routing.trace, routing.trace.units[0]
    head = dict(zip(HEAD, (trace.model, routing.architecture, trace.layers, experts, routing.per_token), strict=True))
    lines = [FORMAT, "# " + " ".join(f"{name}={value}" for name, value in head.items())]
    for layer, sizes in enumerate(zip(routing.expert_bytes, routing.dense_bytes, strict=True)):
        values = zip(BY_LAYER, (layer, *sizes), strict=True)
        lines.append("# " + " ".join(f"{name}={value}" for name, value in values))
    text = "\n".join(lines) + "\n" + _rows(routing).to_csv(index=False, lineterminator="\n")
    data = text.encode()
    path = files.path_of(path)
    with files.disk_trouble_told(path), files.replacing(path) as place:
        place.write_bytes(lzma.compress(data) if path.suffix == ".xz" else data)


def _rows(routing: RouteTrace) -> pd.DataFrame:
    assert routing.trace.weights is not None  # a `RouteTrace` has them
    tables, steps = [], pd.Series(routing.turn).groupby(routing.turn).cumcount().to_numpy()
    for layer, sizes in enumerate(routing.expert_bytes):
        weights = routing.trace.weights[layer][0].numpy()
        token, expert = np.nonzero(routing.trace.active(layer)[0].numpy())
        order = np.lexsort((expert, -weights[token, expert], token))
        token, expert = token[order], expert[order]
        columns = {"turn": routing.turn[token], "phase": routing.decoding[token].astype(int), "step": steps[token]}
        columns |= {"layer": layer, "slot": pd.Series(token).groupby(token).cumcount().to_numpy(), "expert": expert}
        columns |= {"weight": weights[token, expert], "residency": 0, "expert_bytes": sizes}
        tables.append(pd.DataFrame(columns))
    return pd.concat(tables).sort_values(["turn", "step", "layer", "slot"], kind="stable")[list(COLUMNS)]


def _text(path: Path) -> str:
    try:
        data = read_regular(path, LIMIT_BYTES)
        if path.suffix == ".xz":
            with lzma.open(BytesIO(data)) as stream:
                data = stream.read(LIMIT_BYTES + 1)
            if len(data) > LIMIT_BYTES:
                raise ValueError(f"more than {LIMIT_BYTES >> 20} MB of text")
        return data.decode("utf-8").replace("\r\n", "\n")
    except (OSError, ValueError, EOFError, lzma.LZMAError) as error:
        raise UserError(f"{path}: cannot be read as a route trace: {error}") from error


def _header(head: list[str], path: Path) -> tuple[dict[str, str | int], list[dict[str, int]]]:
    """The model's and each layer's entries in the header."""
    if not head or head[0].strip() != FORMAT:
        raise UserError(f"{path}: begins with {(head or ['no header'])[0][:60]!r}; expected {FORMAT!r}")
    about = _pairs(head[1] if len(head) > 1 else "#", HEAD, path)
    counts = {name: _number(about[name], name, 1, path) for name in HEAD[2:]}
    if counts["n_expert_used"] > counts["n_expert"]:
        raise UserError(f"{path}: {counts['n_expert_used']} experts a token of {counts['n_expert']}")
    by_layer = [
        {name: _number(value, name, 0, path) for name, value in _pairs(line, BY_LAYER, path).items()}
        for line in head[2:]
    ]
    if [each["layer"] for each in by_layer] != list(range(counts["n_layer"])):
        raise UserError(
            f"{path}: header lines of {len(by_layer)} layers; expected 0 to {counts['n_layer'] - 1} in order"
        )
    return about | counts, by_layer


def _pairs(line: str, names: tuple[str, ...], path: Path) -> dict[str, str]:
    pairs = dict(part.partition("=")[::2] for part in line[1:].split())
    if tuple(pairs) != names:
        raise UserError(f"{path}: header line {line[:80]!r}; expected {', '.join(names)}")
    return pairs


def _number(text: str, name: str, least: int, path: Path) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 16) or int(text) < least:
        raise UserError(f"{path}: {name}={text[:40]}; expected a whole number, at least {least}")
    return int(text)


def _table(text: str, path: Path) -> pd.DataFrame:
    """The rows as numbers of the right kind."""
    kinds = dict.fromkeys(COLUMNS, np.int64) | {"weight": np.float64}
    try:
        first = text.partition("\n")[0].strip()
        if first != ",".join(COLUMNS):
            raise ValueError(f"columns {first[:100]!r}; expected {','.join(COLUMNS)}")
        lines = text.splitlines()
        if wrong := [number for number, line in enumerate(lines) if line.count(",") != len(COLUMNS) - 1]:
            raise ValueError(f"row {wrong[0]} has {lines[wrong[0]].count(',') + 1} columns of {len(COLUMNS)}")
        return pd.read_csv(BytesIO(text.encode()), dtype=kinds, na_filter=False)
    except (ValueError, OverflowError, pd.errors.ParserError) as error:
        raise UserError(f"{path}: cannot be read as a route trace: {' '.join(str(error).split())[:200]}") from error


def _assembled(
    table: pd.DataFrame, about: dict[str, str | int], by_layer: list[dict[str, int]], path: Path
) -> RouteTrace:
    layers, experts, used = (int(about[name]) for name in HEAD[2:])
    bounds = {"phase": 2, "layer": layers, "slot": used, "expert": experts, "residency": 2}
    for name in COLUMNS:
        wrong = table[~table[name].between(0, bounds.get(name, np.inf), inclusive="left" if name in bounds else "both")]
        if len(wrong) or not np.isfinite(table[name]).all():
            row = (wrong if len(wrong) else table[~np.isfinite(table[name])]).iloc[0]
            raise UserError(f"{path}: row {row.name + 1}: {name} is {row[name]:g}; expected {_range(name, bounds)}")
    if not len(table):
        raise UserError(f"{path}: no rows: expected what each token uses")
    tokens = table.groupby(["turn", "step"])["phase"].agg(["first", "nunique"])
    if (tokens["nunique"] > 1).any():
        raise UserError(f"{path}: turn and step {tokens['nunique'].idxmax()} have two phases; expected one")
    if len(tokens) * layers * experts > LIMIT_WEIGHTS:
        raise UserError(f"{path}: {len(tokens)} tokens × {layers} layers × {experts} experts are too many to hold")
    _check_slots(table, used, path)
    token = tokens.index.get_indexer(pd.MultiIndex.from_frame(table[["turn", "step"]]))
    active = np.zeros((layers, len(tokens), experts), dtype=bool)
    weights = np.zeros(active.shape, dtype=np.float32)
    place = (table["layer"].to_numpy(), token, table["expert"].to_numpy())
    active[place], weights[place] = True, table["weight"]
    ids = torch.full((1, len(tokens)), UNKNOWN_TOKEN, dtype=torch.int32)
    trace = Trace(
        Path(str(about["model"])).name, path.name, ids, (experts,) * layers,
        tuple(pack(torch.from_numpy(each)[None]) for each in active), "expert", None,
        tuple(torch.from_numpy(each)[None] for each in weights),
    )  # fmt: skip
    expert_bytes, dense_bytes = (tuple(each[name] for each in by_layer) for name in BY_LAYER[1:])
    turns = tokens.index.get_level_values("turn").to_numpy()
    decoding = tokens["first"].to_numpy().astype(bool)
    return RouteTrace(trace, turns, decoding, used, expert_bytes, dense_bytes, str(about["arch"]))


def _range(name: str, bounds: dict[str, int]) -> str:
    return f"0 to {bounds[name] - 1}" if name in bounds else "a finite number, at least 0"


def _check_slots(table: pd.DataFrame, used: int, path: Path) -> None:
    """Raise `UserError` unless each token has each slot of a layer once, or none, and no expert twice."""
    place = ["turn", "step", "layer"]
    for name in ("slot", "expert"):
        if (again := table.duplicated([*place, name])).any():
            row = table[again].iloc[0]
            where = ", ".join(f"{each} {int(row[each])}" for each in place)
            raise UserError(f"{path}: {name} {int(row[name])} twice at {where}; expected once")
    counts = table.groupby(place).size()
    if (counts != used).any():
        where = ", ".join(f"{each} {at}" for each, at in zip(place, (counts != used).idxmax(), strict=True))
        raise UserError(f"{path}: {counts[counts != used].iloc[0]} experts at {where}; expected {used}, or no rows")

"""One race: the ways of running a model in whole processes within limits of memory, beside llama.cpp and the plan.

    table = bench("model.gguf", ["600MB", "1GB"])       # as it is, and what the plan names
    bench("smollm2-135m", "500MB", ["spqr", "endor"], turns=5)

The columns of the table, a row a way and limit:

- model, limit_mb (of the process), way, rival (of llama.cpp), limited (by a memory cgroup);
- tokens_per_s, first_s, read_mb, peak_mb with `_low` and `_high`, verdict, tokens, text, text_hash, note, turns,
  disturbed: what `toolkit.measure.processes.table` says;
- predicted_per_s (NaN without a prediction), at_best (it is a limit by bytes);
- relative, relative_low, relative_high (perplexity over the model's own; NaN if nobody has measured it), guess (it is
  another model's), quality_of.
"""

import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import nan
from numbers import Real
from pathlib import Path
from typing import Any

import pandas as pd

from toolkit import memory_limits
from toolkit.cache import cached
from toolkit.errors import UserError, unknown
from toolkit.interchange.reading import load_tokenizer
from toolkit.measure import llama_cpp, memory_group
from toolkit.measure.processes import (
    TURN_S,
    LlamaCppRun,
    OurRun,
    ProcessContestant,
    ProcessTurn,
    table,
    take_turns,
)
from toolkit.models import MODELS
from toolkit.models.gguf_header import read_header
from toolkit.models.named import gguf_file, parts_of
from toolkit.offload.variant import no_kv_type
from toolkit.planner.choices import PROMPT
from toolkit.planner.memory import check_kv_type
from toolkit.planner.plan import Recommendation, plan
from toolkit.planner.prices import Quality, price_of
from toolkit.planner.target import Target, open_target
from toolkit.planner.treatments import identity
from toolkit.planner.ways import RIVAL, PlannedWay
from toolkit.progress import tell
from toolkit.storage.store import Store

TURNS, TOKENS = 3, 32
AS_IS, PACKED = "as-is", "packed"
PRICES = {"relative": "ratio", "relative_low": "low", "relative_high": "high", "guess": "guess", "quality_of": "model"}
UNKNOWN = Quality(nan, nan, nan, "")
ROWS = ("model", "limit_mb", "way", "rival", "limited")


@dataclass(frozen=True)
class Contender:
    """A way in the race: its contestant, the rows of plans that have it, by limit in bytes, and its price if known."""

    contestant: ProcessContestant
    rival: bool
    planned: Mapping[int, pd.Series] = field(default_factory=dict)
    price: Quality = UNKNOWN


def bench(
    model: str | Path,
    memory: float | str | Sequence[float | str],
    ways: Sequence[str] = (),
    turns: int = TURNS,
    tokens: int = TOKENS,
    prompt: str = PROMPT,
    done: Callable[[pd.DataFrame], None] = lambda rows: None,
    kv_type: str | None = None,
) -> pd.DataFrame:
    """The race of a model's ways at each limit, the smallest first.

    Args:
        model: a name, a folder in Hugging Face's layout, a GGUF file, or a folder that `pack` wrote.
        memory: a limit of the whole process, or several: bytes, or "600MB".
        ways: the names that `names_of` gives, or their beginnings; `AS_IS` is the file as it is. Without any, those
            that the plan for each limit names. llama.cpp with the model's own GGUF file takes part in any case.
        turns: of each way and limit.
        tokens: of a turn, at most; slow ways make fewer (`toolkit.measure.processes.tokens_within`).
        prompt: what the text begins with.
        done: is called as each turn ends, with the row of the turns so far.
        kv_type: of keys and values of a GGUF file as it is (`run --kv-type`); llama.cpp's are its own, f16.

    A way that is not packed yet is packed once, and kept in the cache. Raises `UserError` for a model that is not at
    hand, an unknown way, or no way at all.
    """
    model, sizes = str(model), [memory] if isinstance(memory, str | Real) else memory
    limits = sorted({memory_limits.bytes_of("memory", size) or 0 for size in sizes})
    if not limits or limits[0] < 1 or min(turns, tokens) < 1:
        raise UserError(f"memory {memory}, turns {turns}, tokens {tokens}: expected more than nothing, such as 700MB")
    packed = (Path(model) / "index.json").is_file()
    if packed and ways:
        raise UserError(f"ways {','.join(ways)}: {model} is packed already, which is one way; leave them out")
    if packed and kv_type:
        raise no_kv_type(model, kv_type)
    entries = _of_folder(Path(model), limits) if packed else _of_model(model, limits, ways, kv_type)
    return race(model, entries, limits, turns, tokens, prompt, done)


def race(
    model: str,
    entries: Mapping[int, Sequence[Contender]],
    limits: Sequence[int],
    turns: int = TURNS,
    tokens: int = TOKENS,
    prompt: str = PROMPT,
    done: Callable[[pd.DataFrame], None] = lambda rows: None,
    turn_s: float = TURN_S,
) -> pd.DataFrame:
    """The race of these entries, by limit; the columns are those of `bench`.

    A turn has `tokens`, or fewer if these would take more than `turn_s` seconds.
    """
    if reason := memory_group.missing():
        tell(f"no limit for llama.cpp: {reason}")
    for entry in {entry.contestant.name: entry for limit in limits for entry in entries[limit]}.values():
        entry.contestant.warm_up(prompt, limits[-1])
    tables = []
    for limit in limits:
        by_name = {entry.contestant.name: entry for entry in entries[limit]}
        ended: list[ProcessTurn] = []

        def show(turn: ProcessTurn, limit: int = limit, by_name: dict = by_name, ended: list = ended) -> None:
            ended.append(turn)
            own = [[past] for past in ended if past.name == turn.name]
            done(_described(table(own), model, limit, by_name))

        contestants = [entry.contestant for entry in by_name.values()]
        rows = {name: entry.planned[limit] for name, entry in by_name.items() if limit in entry.planned}
        expected = {name: row["tokens_s"] for name, row in rows.items() if not row["at_best"]}
        tell(f"within {limit / 1e6:.0f} MB: {turns} {'turn' if turns == 1 else 'turns'} of {'; '.join(by_name)}")
        rounds = take_turns(contestants, limit, prompt, turns, tokens, expected, show, turn_s)
        tables.append(_described(table(rounds), model, limit, by_name))
    return pd.concat(tables, ignore_index=True)


def names_of(target: Target) -> dict[str, PlannedWay]:
    """The ways of a model that the race knows, by names without spaces or commas."""
    named = {name_of(way): way for way in target.ways if way.runs_here}
    return {AS_IS if way.file else name: way for name, way in named.items()}


def name_of(way: PlannedWay) -> str:
    """The way's name as an option or a folder has it: "spqr-3-bits-head-too"."""
    return "-".join(re.findall(r"\w+", way.name))


def _described(rows: pd.DataFrame, model: str, limit: int, entries: Mapping[str, Contender]) -> pd.DataFrame:
    """The table of a limit with the columns that the race adds."""
    planned = [entries[name].planned.get(limit, pd.Series(dtype=object)) for name in rows["way"]]
    rival, limited = [entries[name].rival for name in rows["way"]], memory_group.missing() is None
    rows = rows.assign(model=model, limit_mb=limit / 1e6, rival=rival, limited=limited | ~pd.Series(rival))
    rows["predicted_per_s"] = [row.get("tokens_s", nan) for row in planned]
    rows["at_best"] = [row.get("at_best", nan) for row in planned]
    for column, name in PRICES.items():
        rows[column] = [getattr(entries[way].price, name) for way in rows["way"]]
    return rows[[*ROWS, *(name for name in rows if name not in ROWS)]]


def _of_folder(folder: Path, limits: Sequence[int]) -> dict[int, list[Contender]]:
    """A packed folder, and llama.cpp with the file that was packed, if it was one; nothing is planned."""
    name = str(Store.open(folder).model.get("name"))
    file = None if name in MODELS and parts_of(name) else gguf_file(name)
    entries = [Contender(OurRun(folder.name, folder), False)]
    if file and file.is_file():
        kind = read_header(file).quantisation
        entries += [Contender(rival, True) for rival in rivals_of(f"llama.cpp, {kind}", file)]
    return dict.fromkeys(limits, entries)


def _of_model(
    model: str, limits: Sequence[int], names: Sequence[str], kv_type: str | None
) -> dict[int, list[Contender]]:
    """The ways of a model, those that are named or planned, and llama.cpp with its file."""
    target = open_target(model)
    if not target.loadable:
        raise UserError(f"{model}: no weights of it are at hand; name a folder, a file or an id")
    check_kv_type(target.file, target.name, kv_type)
    plans = {limit: found for limit in limits if (found := _planned(target, limit, kv_type))}
    tables = {limit: found.table.set_index("way") for limit, found in plans.items()}
    known = names_of(target)
    if names:
        meant = [named_way(name, known, [*tables.values()]) for name in names]
        chosen = dict.fromkeys(limits, meant)
    else:
        of_plan = {limit: [choice.way for choice in found.choices] for limit, found in plans.items()}
        chosen = {limit: [way for way in known.values() if way.name in of_plan.get(limit, ())] for limit in limits}
    racing = {way.name: way for limit in limits for way in chosen[limit]}
    described = {way.name: (_rows(tables, way.name), price_of(target, way)) for way in target.ways}
    ours = {name: Contender(_contestant(target, way, kv_type), False, *described[name]) for name, way in racing.items()}
    rivals = []
    for way in target.ways if target.file else ():
        if way.kind == RIVAL and way.file:
            rivals = [Contender(rival, True, *described[way.name]) for rival in rivals_of(way.name, target.file)]
    if not ours and not rivals:
        raise UserError(f"{model}: the plan names no way of the toolkit within {limits[-1] / 1e6:.0f} MB; name some")
    return {limit: [*(ours[way.name] for way in chosen[limit]), *rivals] for limit in limits}


def named_way(name: str, known: Mapping[str, PlannedWay], tables: Sequence[pd.DataFrame]) -> PlannedWay:
    """The way of a name, or of its beginning: of several, the one with the lowest price, then the fastest.

    Args:
        name: as `name_of` or `AS_IS` has it.
        known: ways by name.
        tables: those of plans, a row a way.

    Raises `UserError` for a name that no way has.
    """
    if name in known:
        return known[name]
    meant = [way for full, way in known.items() if f"{full}-".startswith(f"{name}-") and full != AS_IS]
    if not meant:
        raise unknown("way", name, known)
    for planned in tables:
        rows = planned[planned.index.isin([way.name for way in meant])]
        if len(rows):
            order = rows.assign(price=rows["relative"].round(2), speed=-rows["tokens_s"])
            best = order.sort_values(["price", "speed"]).index[0]
            return next(way for way in meant if way.name == best)
    return meant[0]


def _planned(target: Target, limit: int, kv_type: str | None) -> Recommendation | None:
    def measuring(bounds: pd.DataFrame) -> None:
        tell("measuring this machine: two minutes")

    try:
        return plan(target, memory_bytes=limit, measuring=measuring, kv_type=kv_type)
    except UserError as error:
        tell(f"no plan: {error}")
        return None


def _rows(tables: Mapping[int, pd.DataFrame], name: str) -> dict[int, pd.Series]:
    """The rows of a way in the plans that have it, by limit."""
    return {limit: table.loc[name] for limit, table in tables.items() if name in table.index}


def _contestant(target: Target, way: PlannedWay, kv_type: str | None) -> OurRun:
    """The file as it is, or a folder that is packed first, once."""
    if way.file:
        return OurRun(way.name, target.file, ["--kv-type", kv_type] if kv_type else [])
    return OurRun(way.name, packed_folder(target.name, way.pack), shlex.split(way.run))


def packed_folder(model: str, options: str) -> Path:
    """The folder that `pack` writes of a model with these options; it is kept in the cache.

    Later versions of the code use it, too, as they use a folder of the user's: `run` refuses one that it cannot read.
    """

    def fill(folder: Path) -> None:
        tell(f"packing by `pack {model} {options}`, once; --ways chooses others")
        words = ["pack", model, *shlex.split(options), "--no-evaluate", "--out", str(folder / PACKED)]
        if subprocess.run([sys.executable, "-P", "-m", "toolkit", *words], stdout=sys.stderr, check=False).returncode:
            raise UserError(f"`pack {model} {options}` failed, as it says above")

    key = {"model": model, "weights": identity(model), "options": options}
    return cached("packed", key, (), fill) / PACKED


def rivals_of(name: str, file: Path) -> list[LlamaCppRun]:
    """llama.cpp with a file; nothing, and a line, where it cannot run."""
    if reason := llama_cpp.missing():
        tell(f"{name} takes no part: {reason}")
        return []
    tokenizer: Any = load_tokenizer(file)
    decode = partial(tokenizer.decode, skip_special_tokens=True)
    return [LlamaCppRun(name, file, lambda text: tokenizer(text)["input_ids"], decode)]

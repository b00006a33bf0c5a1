"""Contestants that do the same work take turns, so that a slow spell of the machine hits all of them.

    spans = take_turns([StreamedModel(...), AcceleratedModel(...)], repetitions=5, tokens=4, skipped=1)
    median_stages(spans[spans["method"] == "endor"])

In a turn a contestant is opened, takes some tokens, and is closed; then its outputs are checked. Each repetition begins
with the next contestant.
"""

import importlib.metadata
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from datetime import UTC, datetime

import pandas as pd
import torch

from toolkit.cache import kept
from toolkit.errors import UserError
from toolkit.machines.probe import describe
from toolkit.measure.contestant import Contestant
from toolkit.progress import progress
from toolkit.timeline.spans import Span, Timeline

SPAN = list(Span.__dataclass_fields__)
CIRCUMSTANCES = ["mode", "measured_at"]  # the same for all spans of a turn
VERSIONED = ("torch", "numba", "transformers", "accelerate")


def circumstances() -> dict[str, object]:
    """What measurements depend on beside their arguments: machine, disk, number of threads, versions of libraries."""
    versions = {name: importlib.metadata.version(name) for name in VERSIONED}
    return {"machine": describe(), "threads": torch.get_num_threads(), "versions": versions}


# decorates a function that measures: its table is kept, and measured again under other circumstances
measured = kept("measured", key=circumstances)


def take_turns(
    contestants: Sequence[Contestant],
    repetitions: int,
    tokens: int = 1,
    skipped: int = 0,
    warm_up: int = 0,
    stay_open: bool = False,
) -> pd.DataFrame:
    """The spans of all turns: one row per span, in the order of repetitions, contestants as given, and time.

    Args:
        contestants: those that take turns, with labels that differ.
        repetitions: turns of each that count.
        tokens: of each turn, that count.
        skipped: tokens at the start of each turn that do not count; they fill buffers and caches.
        warm_up: turns of each before the first one that counts.
        stay_open: contestants are opened once, before the first turn, and all of them are in memory at once. Reads
            under way at a turn's end are not among its spans then.

    Columns: the labels; repetition, from 1; tokens; token, its number in the turn, which begins with `skipped`; the
    fields of `Span`, with seconds counted from the start of the first token and without the time between tokens;
    stored_bytes (`Contestant.nbytes`), memory_bytes, mode; measured_at, in UTC. Raises `UserError` for fewer than one
    turn or token, contestants with different limits of memory, and what their `check` raises.
    """
    if min(repetitions, tokens) < 1:
        raise UserError(f"repetitions={repetitions}, tokens={tokens}: expected 1 or more of each")
    if len(limits := sorted({contestant.memory for contestant in contestants})) > 1:
        raise UserError(f"contestants may take {limits} bytes of memory: expected one limit for all")
    tables = []
    with ExitStack() as stack, progress("turns", len(contestants) * (warm_up + repetitions), "turns") as bar:
        for contestant in contestants if stay_open else ():
            stack.enter_context(contestant.open())
        for repetition in range(1 - warm_up, repetitions + 1):
            first = (repetition - 1 + warm_up) % len(contestants)
            turns = {}
            for contestant in [*contestants[first:], *contestants[:first]]:
                turns[contestant] = _turn(contestant, tokens, skipped, stay_open)
                bar.update()
            for contestant in contestants if repetition > 0 else ():
                tables.append(turns[contestant].assign(**contestant.labels, repetition=repetition, tokens=tokens))
    moment = datetime.now(UTC).isoformat(timespec="seconds")
    return pd.concat(tables, ignore_index=True).assign(measured_at=moment)


def _turn(contestant: Contestant, tokens: int, skipped: int, is_open: bool) -> pd.DataFrame:
    outputs, instants = [], []
    with nullcontext() if is_open else contestant.open():
        for number in range(skipped + tokens):
            contestant.prepare()
            begun_s = contestant.now_s()
            outputs.append(contestant.token(number))
            instants.append((begun_s, contestant.now_s()))
    for number, output in enumerate(outputs):
        contestant.check(number, output)
    rows, start_s = [], 0.0
    for number, (begun_s, ended_s) in enumerate(instants[skipped:], skipped):
        for span in contestant.window(begun_s, ended_s).spans:
            times = {"start_s": span.start_s + start_s, "end_s": span.end_s + start_s}
            rows.append(vars(span) | times | {"token": number})
        start_s += ended_s - begun_s
    table = pd.DataFrame(rows, columns=["token", *SPAN]).astype({"layer": "Int64"})
    sizes = {"stored_bytes": contestant.nbytes, "memory_bytes": contestant.memory, "mode": contestant.mode}
    return table.sort_values("start_s", kind="stable").assign(**sizes)


def timeline_of(spans: pd.DataFrame) -> Timeline:
    """The timeline that rows with the columns of `SPAN` make."""
    return Timeline(tuple(Span(**row) for row in spans[SPAN].to_dict("records")), "measured")


def median_repetition(spans: pd.DataFrame) -> int:
    """The number of the repetition whose total is the median, the lower one of two."""
    totals = {number: timeline_of(rows).total_s for number, rows in spans.groupby("repetition")}
    return sorted(totals, key=totals.get)[(len(totals) - 1) // 2]


def median_stages(spans: pd.DataFrame) -> pd.DataFrame:
    """`Timeline.stages()` of the median repetition, with the columns of `CIRCUMSTANCES`.

    low_s, median_s and high_s are each stage's least, median and most seconds of all repetitions.
    """
    stages = {number: timeline_of(rows).stages() for number, rows in spans.groupby("repetition")}
    seconds = pd.concat(stages).groupby("stage")["seconds"]
    shown = stages[median_repetition(spans)]
    spread = {"low_s": seconds.min(), "median_s": seconds.median(), "high_s": seconds.max()}
    shown = shown.assign(**{name: shown["stage"].map(values) for name, values in spread.items()})
    return shown.assign(**spans[CIRCUMSTANCES].iloc[0])

"""Contestants that do the same work take turns, so that a slow spell of the machine affects all of them.

    spans = take_turns([PackedModel(...), AcceleratedModel(...)], repetitions=5, tokens=4, skipped=1)
    by_turn(spans, ["method"])      # of toolkit.measure.summary

In a turn a contestant is opened, takes some tokens, and is closed; then its outputs are checked. Each repetition begins
with the next contestant. A repetition that other work disturbed (`toolkit.measure.disturbance`) is taken again by all
contestants, since ratios are formed within a repetition.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import count
from typing import Protocol, TypeVar

import pandas as pd
import torch

from toolkit.cache import kept
from toolkit.errors import UserError
from toolkit.extras import installed_versions
from toolkit.machines.probe import describe
from toolkit.measure.contestant import Contestant
from toolkit.measure.disturbance import Guard, Load
from toolkit.progress import progress
from toolkit.timeline import Span, Timeline

SPAN = list(Span.__dataclass_fields__)
VERSIONED = ("torch", "numba", "transformers", "accelerate")
MOST_IN_VAIN = 2  # disturbed repetitions taken again and disturbed again: the machine is busy for longer


def circumstances() -> dict[str, object]:
    """The circumstances that measurements depend on: machine, disk, number of threads, versions of libraries."""
    return {"machine": describe(), "threads": torch.get_num_threads(), "versions": installed_versions(VERSIONED)}


# decorates a function that measures: its table is kept, and measured again under other circumstances
measured = kept("measured", key=circumstances)


def take_turns(
    contestants: Sequence[Contestant],
    repetitions: int,
    tokens: int = 1,
    skipped: int = 0,
    warm_up: int = 0,
    stay_open: bool = False,
    tell: Callable[[Contestant, float], None] = lambda contestant, tokens_per_s: None,
) -> pd.DataFrame:
    """The spans of all turns: one row per span, in the order of repetitions, contestants as given, and time.

    Args:
        contestants: those that take turns, with labels that differ.
        repetitions: turns of each that count.
        tokens: of each turn, that count.
        skipped: tokens at the start of each turn that do not count; they fill buffers and caches. A contestant with a
            `turn` of its own has other numbers of both.
        warm_up: turns of each before the first one that counts.
        stay_open: contestants are opened once, before the first turn, and all of them are in memory at once. Reads
            under way at a turn's end are not among its spans then.
        tell: is called at the end of each turn, with the tokens a second that counted.

    Disturbed repetitions are taken again at the end, the worst first, until none is left, as many have been taken again
    as were asked for, or `MOST_IN_VAIN` in succession were disturbed as well. The less disturbed of two counts.

    Columns: the labels; repetition, from 1; tokens; token, its number in the turn, which begins with `skipped`; the
    fields of `Span`, with seconds counted from the start of the first token and without the time between tokens;
    stored_bytes (`Contestant.nbytes`), memory_bytes, mode; build, if a contestant has one; others_cores, stolen_cores
    and disturbed of the turn (`Load`); measured_at, in UTC. Raises `UserError` for fewer than one turn or token,
    contestants with different limits of memory, and what their `check` raises.
    """
    if min(repetitions, tokens) < 1:
        raise UserError(f"repetitions={repetitions}, tokens={tokens}: expected 1 or more of each")
    if len(limits := sorted({contestant.memory for contestant in contestants})) > 1:
        raise UserError(f"contestants may take {limits} bytes of memory: expected one limit for all")
    guard, firsts = Guard(), count()
    with ExitStack() as stack, progress("turns", len(contestants) * (warm_up + repetitions), "turns") as bar:
        for contestant in contestants if stay_open else ():
            stack.enter_context(contestant.open())

        def repetition() -> list[_Turn]:
            first, turns = next(firsts) % len(contestants), {}
            for contestant in [*contestants[first:], *contestants[:first]]:
                turns[contestant] = _turn(contestant, *(contestant.turn or (tokens, skipped)), stay_open, guard)
                bar.update()
                spans = turns[contestant].spans
                tell(contestant, spans["token"].nunique() / timeline_of(spans).total_s)
            return [turns[contestant] for contestant in contestants]

        for _ in range(warm_up):
            repetition()
        rounds = [repetition() for _ in range(repetitions)]
        guard.close()

        def again() -> list[_Turn]:
            bar.set_description("turns, those that other work disturbed once more", refresh=False)
            bar.total += len(contestants)
            return repetition()

        take_again(rounds, again, guard)
    labels = [contestant.labels for contestant in contestants]
    tables = [
        turn.spans.assign(**own, repetition=number, tokens=turn.spans["token"].nunique(), **turn.load.columns())
        for number, turns in enumerate(rounds, 1)
        for own, turn in zip(labels, turns, strict=True)
    ]
    moment = datetime.now(UTC).isoformat(timespec="seconds")
    return pd.concat(tables, ignore_index=True).assign(measured_at=moment)


class _HasLoad(Protocol):
    @property
    def load(self) -> Load: ...


Loaded = TypeVar("Loaded", bound=_HasLoad)


@dataclass(frozen=True)
class _Turn:
    spans: pd.DataFrame
    load: Load


def take_again(rounds: list[list[Loaded]], repetition: Callable[[], list[Loaded]], guard: Guard) -> None:
    """Take disturbed rounds again, and put the new ones in the place of those that were disturbed more.

    Args:
        rounds: the turns of each repetition; a turn has a `load` (`toolkit.measure.disturbance.Load`).
        repetition: takes a turn of all contestants.
        guard: that gives turns their loads.
    """
    in_vain = 0
    for _ in range(len(rounds)):
        worst = max(range(len(rounds)), key=lambda number: _cores(rounds[number]))
        if in_vain == MOST_IN_VAIN or not any(turn.load.disturbed for turn in rounds[worst]):
            return
        again = repetition()
        guard.close()
        in_vain = in_vain + 1 if any(turn.load.disturbed for turn in again) else 0
        if _cores(again) < _cores(rounds[worst]):
            rounds[worst] = again


def _cores(turns: Sequence[_HasLoad]) -> float:
    return max(turn.load.cores for turn in turns)


def _turn(contestant: Contestant, tokens: int, skipped: int, is_open: bool, guard: Guard) -> _Turn:
    outputs, instants = [], []
    with nullcontext() if is_open else contestant.open(), guard.turn() as load:
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
    sizes |= {"build": contestant.build} if contestant.build else {}
    table = table.assign(seconds=table["end_s"] - table["start_s"], **sizes)
    return _Turn(table.sort_values("start_s", kind="stable"), load)


def timeline_of(spans: pd.DataFrame) -> Timeline:
    """The timeline that rows with the columns of `SPAN` make."""
    return Timeline(tuple(Span(**row) for row in spans[SPAN].to_dict("records")), "measured")

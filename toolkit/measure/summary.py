"""Turns in a table, one row each, and a summary of the turns of each contestant.

    turns = by_turn(take_turns(contestants, repetitions=5), ["method"])
    summary(turns, ["method"], over={"speedup": {"method": "dense"}})

One convention for all tables: a number is the median of the turns; `NAME_low` and `NAME_high` are the least and the
most of them. Ratios are formed within a repetition, in which a slow spell of the machine affects both.
"""

from collections.abc import Mapping, Sequence

import pandas as pd

from toolkit.machines.machine import GB
from toolkit.measure.turns import timeline_of

STAGES = ("read", "decode", "manage", "compute", "other")
OF_TURN = ["stored_bytes", "memory_bytes", "mode", "disturbed", "measured_at"]  # the same for all spans of a turn
BUILD = "build"  # of another program: a column of races with one only
Baseline = Mapping[str, object]


def by_turn(spans: pd.DataFrame, by: Sequence[str]) -> pd.DataFrame:
    """One row per turn, in the order of the spans of `take_turns`: the labels `by`, repetition, and a token's numbers.

    Columns: seconds, tokens_per_s, read_bytes, and the seconds in which each of `STAGES` was busy (`read_s`, ...), all
    of one token on average; `OF_TURN`; and `BUILD` if it is there. A read that the turn's window cuts counts in
    proportion.
    """
    keys, rows, constants = [*by, "repetition"], [], [*OF_TURN, *spans.columns.intersection([BUILD])]
    for labels, turn in spans.groupby(keys, sort=False):
        tokens, timeline = turn["token"].nunique(), timeline_of(turn)
        seconds = timeline.total_s / tokens
        numbers = {"seconds": seconds, "tokens_per_s": 1 / seconds}
        numbers["read_bytes"] = turn.loc[turn["stage"] == "read", "nbytes"].sum() / tokens
        numbers |= {f"{stage}_s": timeline.busy_s(stage) / tokens for stage in STAGES}
        rows.append(dict(zip(keys, labels, strict=True)) | numbers | turn[constants].iloc[0].to_dict())
    return pd.DataFrame(rows)


def summary(
    turns: pd.DataFrame, by: Sequence[str], ranges: Sequence[str] = ("seconds",), over: Mapping[str, Baseline] = {}
) -> pd.DataFrame:
    """One row per contestant: the medians over its turns, and ranges of the columns that `ranges` and `over` name.

    Args:
        turns: one row per turn, with the labels `by`, repetition, disturbed, and numbers.
        by: the labels that tell contestants apart.
        ranges: columns that get `NAME_low` and `NAME_high`.
        over: ratios to add, each with its baseline (`times_as_fast`).

    A column of no numbers has the first turn's value; `disturbed` is the share of turns that other work disturbed.
    """
    turns = turns.assign(**{name: times_as_fast(turns, by, baseline) for name, baseline in over.items()})
    groups = turns.groupby(list(by), sort=False)
    table = groups.first().assign(**groups.median(numeric_only=True)).drop(columns="repetition")
    for name in (*ranges, *over):
        table[f"{name}_low"], table[f"{name}_high"] = groups[name].min(), groups[name].max()
    if "disturbed" in turns:
        table["disturbed"] = groups["disturbed"].mean()
    return table.reset_index()


def times_as_fast(turns: pd.DataFrame, by: Sequence[str], baseline: Baseline, column: str = "seconds") -> pd.Series:
    """How many times as fast each turn is as that of its baseline in the same repetition; NaN where there is none.

    The baseline has the same labels but for those given: `{"method": "dense"}`, or a mapping from a contestant's own
    label to its baseline's, `{"method": {"csr": "ptcsr", "ptcsr": "csr"}}`. Divides the baseline's `column` by the
    turn's.
    """
    keys = [*by, "repetition"]
    others = {name: turns[name].map(label) if isinstance(label, Mapping) else label for name, label in baseline.items()}
    wanted = pd.MultiIndex.from_frame(turns[keys].assign(**others))
    theirs = turns.set_index(keys)[column]
    return theirs[theirs.index.isin(wanted)].reindex(wanted).to_numpy() / turns[column]


def stage_summary(spans: pd.DataFrame) -> pd.DataFrame:
    """The `summary` of one contestant's turns, stage by stage: the columns of `Timeline.stages()`, with ranges.

    Each stage has the median of its own seconds, so stages add up to the total only nearly. tokens of a turn,
    stored_bytes, mode, disturbed and measured_at come after them.
    """
    tables = [
        timeline_of(turn).stages().assign(repetition=number, **turn[["tokens", *OF_TURN]].iloc[0])
        for number, turn in spans.groupby("repetition")
    ]
    table = summary(pd.concat(tables, ignore_index=True), ["stage"])
    total_s = table.loc[table["stage"] == "total", "seconds"].item()
    rates = {"gb_s": (table["nbytes"] / GB / table["seconds"]).fillna(0), "evidence": "measured"}
    return table.assign(share_percent=100 * table["seconds"] / total_s, **rates).drop(columns="memory_bytes")

"""Published numbers beside ours, each with a verdict (`toolkit.evidence.verdicts`)."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from toolkit.errors import UserError
from toolkit.evidence.claims import TOLERANCE, Claim, read_claims
from toolkit.evidence.verdicts import NOT_RUN, WITHIN, Baseline, Spread, keeps, verdict
from toolkit.machines.machine import THIS_MACHINE
from toolkit.measure.disturbance import is_disturbed

FITTED = "the model was fitted to it: the two agree by construction"
DISTURBED = "other work disturbed the measurement, which has no verdict therefore"
WITHOUT_NUMBER = {  # why no table has it, by kind of claim
    "context": "the set-up, or another study's number: nothing to compare",
    "input": "it is what the model starts from, so the model does not give it back",
}
ERRORS = 2  # standard errors on either side of a value
VALUES, LIMITS, STAND_INS = "values", "limits", "stand-ins"
GROUPS = {  # never added up
    VALUES: "the paper gives a value, and ours is of the same model and machine; only values are scored",
    LIMITS: "the paper gives a bound (at least, at most), not a value; a bound has no error",
    STAND_INS: "another model or another machine than the paper's: it can show an effect, never the value",
}
COLUMNS = [
    *("claim", "kind", "same_as", "quantity", "unit", "conditions", "section", "bound", "published"),
    *("ours", "ours_low", "ours_high", "stand_in", "evidence", "profile", "ratio", "verdict", "reason"),
    *("null", "null_ratio"),
]


def compare(table: pd.DataFrame, figure: str, null: pd.DataFrame | None = None) -> pd.DataFrame:
    """The published numbers of a figure beside ours, each with a verdict.

    Columns: `COLUMNS`; a row for each claim and machine (`profile`) with a number for it, one that is `not run` for a
    claim that no machine answers, none if the paper prints no number of the figure. Numbers measured on a machine
    go before those modelled of it. A row without a profile has the claim's `machine`. `ours_low` and `ours_high` are
    the range that the table gives, if any. `reason` says why ours is another number, by the claim for that kind of
    evidence, or why there is none. `null` is the table that a model of nothing but bytes over bandwidth makes of the
    paper's machines; the comparison has its numbers for the same claims, and their ratios.

    The verdicts are those of `toolkit.evidence.verdicts`. The range of a number is that of its runs, or two standard
    errors of `value`; a row with a `chance` has what guessing gives of `value`, which ours must exceed by more than the
    tolerance of 10 % and its own spread. It is `not run` if `table` holds no number that the claim is about, or if
    other work disturbed it (`is_disturbed`).

    A modelled number of an `input` has no verdict (None): the model was fitted to the claim.
    """
    chosen = {claim.id: claim for claim in read_claims(figure.split("/")[0]) if claim.figure == figure}
    machines = _machines(table)
    guesses = {} if null is None else _machines(null)
    rows = []
    for claim in chosen.values():
        answers = [_compare(rows_, claim, chosen, guesses.get(name)) for name, rows_ in machines.items()]
        rows += [answer for answer in answers if answer["ours"] is not None] or answers[:1]
    return pd.DataFrame(rows, columns=COLUMNS)


def _machines(table: pd.DataFrame) -> dict[str | None, pd.DataFrame]:
    """The rows of each machine: those that were measured, if any were. Rows without a machine stay together."""
    if "profile" not in table:
        return {None: table}
    names = table["profile"].astype(object).where(table["profile"].notna(), None)
    return {name: _best(table[names.isna() if name is None else names == name], name) for name in dict.fromkeys(names)}


def _best(rows: pd.DataFrame, machine: str | None) -> pd.DataFrame:
    measured = rows["evidence"].eq("measured") if machine and "evidence" in rows else pd.Series(False, rows.index)
    return rows[measured] if measured.any() else rows


def group(comparison: pd.DataFrame) -> pd.Series:
    """Which of `GROUPS` each row belongs to. Another model, or another machine than the paper's, is a stand-in."""
    elsewhere = comparison["stand_in"].astype(bool) | comparison["profile"].eq(THIS_MACHINE)
    return pd.Series(np.select([elsewhere, comparison["bound"].notna()], [STAND_INS, LIMITS], VALUES), comparison.index)


def is_fitted(compared: Mapping | pd.DataFrame) -> Any:
    """Whether the model was fitted to a claim, or to each of a comparison, so that the two agree by construction."""
    return (compared["kind"] == "input") & (compared["evidence"] == "modelled")


def verdict_table(comparison: pd.DataFrame) -> pd.DataFrame:
    """The columns of a comparison that a reader needs; numbers that were not run stand last."""
    wanted = ["quantity", "conditions", "kind", "verdict", "published", "ours", "null", "unit", "profile", "evidence"]
    numbers = comparison[["published", "ours", "null"]].astype(float)
    words = {name: comparison[name].astype(object).fillna("") for name in ("verdict", "profile", "evidence", "reason")}
    shown = comparison.assign(**numbers, **words)[[*wanted, "reason"]]
    return shown.iloc[shown["verdict"].eq(NOT_RUN).argsort(kind="stable")]


def _compare(table: pd.DataFrame, claim: Claim, claims: dict[str, Claim], null: pd.DataFrame | None = None) -> dict:
    row, stand_in = _counterpart(table, claim)
    ours = _number(row, claim)
    guess = None if null is None or stand_in else _number(_row(null, claim, claim.where), claim)
    disturbed = ours is not None and is_disturbed(row)
    known = row is not None and ours is not None
    evidence = row.get("evidence") if known else None
    fitted = is_fitted({"kind": claim.kind, "evidence": evidence})
    judged: str | None = NOT_RUN
    if ours is not None and not disturbed:
        judged = None if fitted else _judged(table, claim, claims, row, stand_in)
    worded = "in words there" if claim.worded else None
    return {
        **{name: getattr(claim, name) for name in ("kind", "same_as", "quantity", "unit", "section", "bound")},
        "claim": claim.id,
        "conditions": "; ".join(filter(None, [claim.conditions, worded, claim.contradiction])),
        "published": claim.value,
        "ours": ours,
        "ours_low": row.get(f"{claim.column}_low") if known else None,
        "ours_high": row.get(f"{claim.column}_high") if known else None,
        "stand_in": stand_in,
        "evidence": evidence,
        "profile": _or(row.get("profile"), claim.machine) if known else None,
        "ratio": _ratio(ours, claim),
        "verdict": judged,
        "reason": DISTURBED if disturbed else FITTED if fitted else _reason(row, claim, judged, ours),
        "null": guess,
        "null_ratio": _ratio(guess, claim),
    }


def _number(row: pd.Series | None, claim: Claim) -> float | None:
    """The claim's number in a row of a table; None for a stage that has no such number."""
    return None if row is None or pd.isna(row[claim.column]) else float(row[claim.column])


def _ratio(number: float | None, claim: Claim) -> float | None:
    return number / claim.value if number is not None and claim.value else None


def _judged(table: pd.DataFrame, claim: Claim, claims: dict[str, Claim], row: pd.Series, stand_in: bool) -> str:
    slack = claim.tolerance * abs(claim.value) if claim.slack is None else claim.slack
    ours, chance = _spread(row, claim.column), _by_chance(row, claim.column)
    return verdict(ours, claim.value, slack, _beside(table, claim, claims), claim.bound, stand_in, chance)


def _beside(table: pd.DataFrame, claim: Claim, claims: dict[str, Claim]) -> Baseline | None:
    """The number that the claim is beside, or that of another claim; None if our table has no such row."""
    if not isinstance(claim.beside, str):
        return None if claim.beside is None else Baseline(Spread(*[claim.beside] * 3), claim.beside)
    other = claims[claim.beside]
    row, _ = _counterpart(table, other)
    return None if row is None else Baseline(_spread(row, other.column), other.value)


def _reason(row: pd.Series | None, claim: Claim, judged: str, ours: float | None) -> str | None:
    """Why there is no number, or another one: chance, or what the claim says. None if ours is as published."""
    if ours is None:
        absent = "no row of this run answers to it" if claim.column else WITHOUT_NUMBER.get(claim.kind)
        return claim.reason.get(NOT_RUN, absent)
    kept = claim.bound in ("at_least", "at_most") and keeps(ours, claim.value, claim.bound)
    if judged in (WITHIN, NOT_RUN) or kept:
        return None
    if _by_chance(row, claim.column):
        return f"chance alone gives {row['chance']:.3g}"
    return claim.reason.get(row.get("evidence"))


def _by_chance(row: pd.Series, column: str) -> bool:
    """Whether a number is no more than guessing gives."""
    if column != "value" or pd.isna(row.get("chance")):
        return False
    return row["value"] <= row["chance"] * (1 + TOLERANCE) or _spread(row, column).low <= row["chance"]


def _spread(row: pd.Series, column: str) -> Spread:
    """A row's value and the range that its repetitions fall in: itself alone, where the table has no spread.

    `<column>_low` and `<column>_high` give it, or two standard errors of `value`.
    """
    value = float(row[column])
    if row.get("evidence", "measured") != "measured":  # a model has no runs
        return Spread(value, value, value)
    low, high = f"{column}_low", f"{column}_high"
    if low in row and pd.notna(row[low]) and pd.notna(row[high]):
        return Spread(value, float(row[low]), float(row[high]))
    error = ERRORS * float(_or(row.get("standard_error"), 0.0)) if column == "value" else 0.0
    return Spread(value, value - error, value + error)


def _counterpart(table: pd.DataFrame, claim: Claim) -> tuple[pd.Series | None, bool]:
    """The one row of our table that the claim is about, or else its stand-in, and whether it is one."""
    row = _row(table, claim, claim.where)
    if row is not None:
        return row, False
    row = _row(table, claim, claim.stand_in)
    return row, row is not None


def _row(table: pd.DataFrame, claim: Claim, where: Mapping[str, object] | None) -> pd.Series | None:
    """The one row with these values, if the table has it and the claim's column."""
    if where is None or not {claim.column, *where} <= set(table):
        return None
    chosen = table.loc[(table[list(where)] == pd.Series(where)).all(axis=1)]
    if len(chosen) > 1:
        raise UserError(f"claim {claim.id}: {len(chosen)} rows of the table answer to {where}; expected one")
    return None if chosen.empty else chosen.iloc[0]


def _or(value: Any, default: Any) -> Any:
    return default if value is None or (isinstance(value, float) and math.isnan(value)) else value

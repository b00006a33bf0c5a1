"""Published numbers beside ours, each with a verdict, and the score that follows.

The effect of a number is how many times what it is `beside` it is, less one: a speed-up of 1.67 has an effect of 0.67.
If a number is below the one beside it, the inverse ratio counts, with a negative sign: a time over dense of 0.5 and a
speed-up of 2 are the same effect with opposite signs, so a time and the speed-up made from it get the same verdict.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from toolkit.costs.machine import THIS_MACHINE
from toolkit.errors import UserError
from toolkit.evidence.claims import KINDS, TOLERANCE, Claim, read_claims
from toolkit.measure.disturbance import is_disturbed

WITHIN = "within tolerance"
SAME_EFFECT = "same effect"
DIRECTION = "direction only"
DIFFERS = "differs"
NOT_RUN = "not run"
FITTED = "the model was fitted to it: the two agree by construction"
DISTURBED = "other work disturbed the measurement, which has no verdict therefore"
VERDICTS = {  # from best to worst
    WITHIN: "ours is within 10 % of the published value, or within the tolerance that the claim states",
    SAME_EFFECT: "another value, but 0.67 to 1.5 times the published effect, and outside the spread of runs",
    DIRECTION: "faster or slower, larger or smaller, as published, by another amount",
    DIFFERS: "ours was run and shows none of these, or no more than chance gives",
    NOT_RUN: "no result here answers to the claim",
}

WITHOUT_NUMBER = {  # why no table has it, by kind of claim
    "context": "the set-up, or another study's number: nothing to compare",
    "input": "it is what the model starts from, so the model does not give it back",
}
EFFECT = (0.67, 1.5)  # the shares of the published effect between which ours is the same
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

    The verdicts, in order of preference:

    - `within tolerance`: ours is within the claim's relative tolerance (10 % unless it says otherwise) or its absolute
      slack of the published value. A limit (`at_least`, `at_most`) is kept by any number on the side that it leaves
      open, and has no slack on the other. Never for a stand-in, which is another quantity.
    - `same effect`: ours lies on the same side of what the claim is beside as the published value does, its effect is
      0.67 to 1.5 times the published one, and it is outside the run-to-run spread: the range of ours and the range of
      what it is beside do not meet (`_range`).
    - `direction only`: ours lies on the same side; or a stand-in keeps the limit.
    - `differs`: ours was run and is none of these, or goes beyond an upper end (`up_to`) by more than the tolerance; or
      its row has a `chance`, what guessing gives of `value`, and ours is not above that by more than the tolerance of
      10 % and its own spread.
    - `not run`: `table` holds no number that the claim is about, or other work disturbed it (`is_disturbed`).

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


def count_verdicts(comparison: pd.DataFrame) -> dict[str, dict[str, int]]:
    """How many quantities of each kind got each verdict: {kind: {verdict: count}}, without zeros.

    Limits and stand-ins are counted by themselves, under "prediction, limits", say. Each quantity counts once a
    machine, with the worst verdict of its records (`same_as`). `context` is not counted: a constant agrees with itself.
    Nor are rows without a verdict.
    """
    rows = comparison[comparison["kind"].ne("context") & comparison["verdict"].notna()].assign(group=group)
    badness = {verdict: place for place, verdict in enumerate(VERDICTS)} | {NOT_RUN: -1}
    names = [(kind, name) for name in GROUPS for kind in KINDS]
    found = {names_: rows[rows["kind"].eq(names_[0]) & rows["group"].eq(names_[1])] for names_ in names}
    counts = {
        kind if name == VALUES else f"{kind}, {name}": _once(part, part["verdict"].map(badness))["verdict"]
        for (kind, name), part in found.items()
        if len(part)
    }
    return {
        label: {verdict: int(verdicts.eq(verdict).sum()) for verdict in VERDICTS if verdicts.eq(verdict).any()}
        for label, verdicts in counts.items()
    }


def predictions(comparison: pd.DataFrame) -> pd.DataFrame:
    """The rows that are scored: values that were modelled for a machine of the paper, and could have missed.

    Raises `UserError` for a modelled prediction that names no machine.
    """
    modelled = comparison["kind"].eq("prediction") & comparison["evidence"].eq("modelled") & comparison["ratio"].notna()
    if len(nameless := comparison[modelled & comparison["profile"].isna()]):
        raise UserError(
            f"{nameless['claim'].iloc[0]} is modelled for no machine: give the table's row a `profile`, or the claim "
            "a `machine`"
        )
    return comparison[modelled & group(comparison).eq(VALUES)]


def score(comparison: pd.DataFrame) -> dict[str, object]:
    """How far the `predictions` on all machines of the paper are off; {} if there are none.

    n: quantities predicted; median_error and largest_error: |ours / published - 1|; largest: the claim that is
    farthest off. Each quantity counts once a machine, with the largest error of its records. null_n, null_median_error
    and null_largest_error are the null model's, for the quantities that it has a number of; same_median_error and
    same_largest_error are ours for these.
    """
    chosen = predictions(comparison)
    if chosen.empty:
        return {}
    errors = chosen.assign(error=_error(chosen["ratio"]), null_error=_error(chosen["null_ratio"]))
    ours = _once(errors, errors["error"])
    farthest = ours.loc[ours["error"].idxmax()]
    result = {
        "n": len(ours),
        "median_error": float(ours["error"].median()),
        "largest_error": float(farthest["error"]),
        "largest": farthest["claim"],
    }
    reached = errors[errors["null_error"].notna()]
    if len(reached):
        for name, column in (("null", "null_error"), ("same", "error")):
            off = _once(reached, reached[column])[column]
            result |= {f"{name}_median_error": float(off.median()), f"{name}_largest_error": float(off.max())}
        result["null_n"] = len(off)
    return result


def _error(ratio: pd.Series) -> pd.Series:
    return (ratio.astype(float) - 1).abs()


def prediction_words(comparison: pd.DataFrame) -> str:
    """The score in words: how many predictions, how far off, and how far the null model is; "no predictions"."""
    found = score(comparison)
    if not found:
        return "no predictions"
    farthest = comparison[comparison["claim"] == found["largest"]].iloc[0]
    words = (
        f"{found['n']} prediction{'s' * (found['n'] > 1)}, off by {found['median_error']:.0%} (median) and "
        f"{found['largest_error']:.0%} (at most, {name_of(farthest)})"
    )
    if "null_n" in found:
        words += (
            f", where bytes over bandwidth and nothing else are off by {found['null_median_error']:.0%} and "
            f"{found['null_largest_error']:.0%}"
        )
        if found["null_n"] < found["n"]:
            words += (
                f" on the {found['null_n']} that they reach (ours there: {found['same_median_error']:.0%} and "
                f"{found['same_largest_error']:.0%})"
            )
    return words


def name_of(row: Mapping | pd.Series) -> str:
    """The subject of a claim, in words: its quantity and the first of its conditions."""
    words = [words for words in (row["quantity"], row["conditions"]) if isinstance(words, str)]
    return ": ".join(words).split(";")[0] or row["claim"]


def omissions(comparison: pd.DataFrame) -> dict[str, int]:
    """How many of a paper's predictions the score leaves out: limits, stand_ins, not_run; of how many quantities."""
    rows = comparison[comparison["kind"] == "prediction"].assign(group=group, quantity=_quantity)
    run = rows[rows["ours"].notna()]
    counted = run.drop_duplicates(["quantity", "profile", "group"])["group"].value_counts()
    every = set(rows["quantity"])
    return {
        "limits": int(counted.get(LIMITS, 0)),
        "stand_ins": int(counted.get(STAND_INS, 0)),
        "not_run": len(every - set(run["quantity"])),
        "quantities": len(every),
    }


def score_sentence(comparison: pd.DataFrame) -> str:
    """Verdicts by kind and the predictions' score in words, for a notebook to print."""
    if comparison.empty:
        return "The paper prints no number of this figure."
    kinds = count_verdicts(comparison).items()
    verdicts = (f"{kind}: {', '.join(f'{count} {name}' for name, count in counts.items())}" for kind, counts in kinds)
    return f"{'; '.join(verdicts)}. On the machines of the paper: {prediction_words(comparison)}."


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
    if ours is None or disturbed:
        verdict = NOT_RUN
    else:
        verdict = None if fitted else _verdict(table, claim, claims, row, stand_in)
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
        "verdict": verdict,
        "reason": DISTURBED if disturbed else FITTED if fitted else _reason(row, claim, verdict, ours),
        "null": guess,
        "null_ratio": _ratio(guess, claim),
    }


def _number(row: pd.Series | None, claim: Claim) -> float | None:
    """The claim's number in a row of a table; None for a stage that has no such number."""
    return None if row is None or pd.isna(row[claim.column]) else float(row[claim.column])


def _ratio(number: float | None, claim: Claim) -> float | None:
    return number / claim.value if number is not None and claim.value else None


def _verdict(table: pd.DataFrame, claim: Claim, claims: dict[str, Claim], row: pd.Series, stand_in: bool) -> str:
    ours, bound = float(row[claim.column]), claim.bound
    if bound in ("at_least", "at_most") and _kept(ours, claim.value, bound):
        return DIRECTION if stand_in else WITHIN
    if bound == "up_to" and _beyond(ours, claim, claims):
        return DIFFERS
    if bound not in ("at_least", "at_most") and not stand_in and abs(ours - claim.value) <= _slack(claim):
        return WITHIN
    return _by_effect(table, claim, claims, row)


def _reason(row: pd.Series | None, claim: Claim, verdict: str, ours: float | None) -> str | None:
    """Why there is no number, or another one: chance, or what the claim says. None if ours is as published."""
    if ours is None:
        absent = "no row of this run answers to it" if claim.column else WITHOUT_NUMBER.get(claim.kind)
        return claim.reason.get(NOT_RUN, absent)
    kept = claim.bound in ("at_least", "at_most") and _kept(ours, claim.value, claim.bound)
    if verdict in (WITHIN, NOT_RUN) or kept:
        return None
    if _by_chance(row, claim.column):
        return f"chance alone gives {row['chance']:.3g}"
    return claim.reason.get(row.get("evidence"))


def _by_chance(row: pd.Series, column: str) -> bool:
    """Whether a number is no more than guessing gives."""
    if column != "value" or pd.isna(row.get("chance")):
        return False
    return row["value"] <= row["chance"] * (1 + TOLERANCE) or _range(row, column)[0] <= row["chance"]


def _kept(ours: float, limit: float, bound: str) -> bool:
    return ours >= limit if bound == "at_least" else ours <= limit


def _slack(claim: Claim) -> float:
    return claim.tolerance * abs(claim.value) if claim.slack is None else claim.slack


def _beyond(ours: float, claim: Claim, claims: dict[str, Claim]) -> bool:
    """Whether ours goes past an upper end, seen from what the claim is beside."""
    beside = claim.beside
    gain = claim.value - (claims[beside].value if isinstance(beside, str) else beside)
    return (ours - claim.value) * math.copysign(1, gain) > _slack(claim)


def _by_effect(table: pd.DataFrame, claim: Claim, claims: dict[str, Claim], row: pd.Series) -> str:
    """`same effect`, `direction only` or `differs`, by what the claim is beside in the paper and here."""
    column, beside = claim.column, claim.beside
    theirs, span = beside, (beside, beside)
    if isinstance(beside, str):
        other = claims[beside]
        neighbour, _ = _counterpart(table, other)
        if neighbour is None:
            return DIFFERS
        theirs, beside, span = other.value, float(neighbour[other.column]), _range(neighbour, other.column)
    ours = float(row[column])
    if beside is None or not min(ours, beside) > 0 or _by_chance(row, column):
        return DIFFERS
    found, published = _effect(ours / beside), _effect(claim.value / theirs)
    if found * published <= 0:
        return DIFFERS
    low, high = _range(row, column)
    apart = low > span[1] or high < span[0]
    return SAME_EFFECT if apart and EFFECT[0] <= found / published <= EFFECT[1] else DIRECTION


def _effect(ratio: float) -> float:
    """How many times as much, less one; negative, and of the inverse ratio, where it is less."""
    return ratio - 1 if ratio >= 1 else 1 - 1 / ratio


def speedup_verdict(ours: float, published: float, low: float, same_machine: bool) -> str:
    """The verdict on a speed-up, beside 1: by the rules of `compare`. `low` is the lower end of ours over the runs.

    Only a number of the paper's own machine can be within the tolerance.
    """
    if same_machine and abs(ours / published - 1) <= TOLERANCE:
        return WITHIN
    found, expected = _effect(ours), _effect(published)
    if found * expected <= 0:
        return DIFFERS
    return SAME_EFFECT if low > 1 and EFFECT[0] <= found / expected <= EFFECT[1] else DIRECTION


def _range(row: pd.Series, column: str) -> tuple[float, float]:
    """The range that repetitions of a row's value fall in: itself alone, where the table has no spread.

    `<column>_low` and `<column>_high` give it, or two standard errors of `value`.
    """
    value = float(row[column])
    if row.get("evidence", "measured") != "measured":  # a model has no runs
        return value, value
    low, high = f"{column}_low", f"{column}_high"
    if low in row and pd.notna(row[low]) and pd.notna(row[high]):
        return float(row[low]), float(row[high])
    error = ERRORS * float(_or(row.get("standard_error"), 0.0)) if column == "value" else 0.0
    return value - error, value + error


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


def _once(comparison: pd.DataFrame, worse: pd.Series) -> pd.DataFrame:
    """One row a quantity (and a paper and machine, where there are several): the one with the largest `worse`."""
    keys = [name for name in ("paper", "profile") if name in comparison]
    ordered = comparison.assign(quantity_id=_quantity, worse=worse).sort_values("worse", ascending=False, kind="stable")
    return ordered.drop_duplicates(["quantity_id", *keys]).drop(columns=["quantity_id", "worse"]).sort_index()


def _quantity(comparison: pd.DataFrame) -> pd.Series:
    """The claim that stands for each row's quantity."""
    return comparison["same_as"].where(comparison["same_as"].notna(), comparison["claim"])


def _or(value: Any, default: Any) -> Any:
    return default if value is None or (isinstance(value, float) and math.isnan(value)) else value

"""Published numbers beside ours, each with a verdict, and the score that follows.

The effect of a number is how far it lies from what it is `beside`: the logarithm of their ratio where both are
positive, otherwise their difference. With the logarithm a speed-up of 2 and a time over dense of 0.5 are the same
effect with opposite signs, so a time and the speed-up made from it get the same verdict.
"""

import math

import numpy as np
import pandas as pd

from toolkit.errors import UserError
from toolkit.evidence.claims import KINDS, claims

WITHIN = "within tolerance"
SAME_EFFECT = "same effect"
SAME_SIGN = "same sign"
DIFFERS = "differs"
NOT_RUN = "not run"
VERDICTS = (WITHIN, SAME_EFFECT, SAME_SIGN, DIFFERS, NOT_RUN)  # from best to worst

TOLERANCE = 0.1  # relative, where a claim gives none
EFFECT = (0.5, 2.0)  # the shares of the published effect between which ours is the same
ERRORS = 2  # standard errors on either side of a value
COLUMNS = [
    *("claim", "kind", "same_as", "quantity", "unit", "conditions", "section", "bound"),
    *("published", "ours", "stand_in", "evidence", "ratio", "verdict", "reason"),
]
NULL = ["null", "null_ratio", "null_verdict"]


def compare(table: pd.DataFrame, figure: str) -> pd.DataFrame:
    """The published numbers of a figure beside ours, each with a verdict.

    Columns: `COLUMNS`; a row a claim, none if the paper prints no number of the figure. `reason` is the claim's,
    where ours is another number. The verdicts, in order of preference:

    - `within tolerance`: ours is within the claim's relative tolerance (10 % unless it says otherwise) or its absolute
      slack of the published value. A limit (`at_least`, `at_most`) is kept by any number on the side that it leaves
      open, and has no slack on the other. Never for a stand-in, which is another quantity.
    - `same effect`: ours lies on the same side of what the claim is beside as the published value does, its effect is
      between half and twice the published one, and it is outside the run-to-run spread: the range of ours and the
      range of what it is beside do not meet (`_range`).
    - `same sign`: ours lies on the same side; or a stand-in keeps the limit.
    - `differs`: ours was run and is none of these, or goes beyond an upper end (`up_to`) by more than the tolerance.
    - `not run`: `table` holds no number that the claim is about.
    """
    records = claims(figure.split("/")[0])
    chosen = {record["id"]: record for record in records[records["figure"] == figure].to_dict("records")}
    return pd.DataFrame([_compare(table, record, chosen) for record in chosen.values()], columns=COLUMNS)


def compare_machines(table: pd.DataFrame, figure: str, null: pd.DataFrame | None = None) -> pd.DataFrame:
    """`compare` for every machine of the table by itself, with a column `profile` more; what was measured goes before
    what was modelled of the same machine.

    All claims are listed for the first machine, the paper's; for each other one those that it can say something about.
    `null` is the table that a model of nothing but bytes over links makes of the first machine (`links_only`). With it
    there are the columns `NULL` more: the null model's number for the claim, its ratio to the published one, and its
    verdict.
    """
    tables = []
    for name, rows in table.groupby("profile", sort=False):
        measured = rows[rows["evidence"] == "measured"]
        compared = compare(measured if len(measured) else rows, figure).assign(profile=name)
        if null is not None and not tables:
            guessed = compare(null, figure)[["ours", "ratio", "verdict"]]
            compared[NULL] = guessed.where(guessed["ours"].notna(), None).to_numpy()
        tables.append(compared[compared["verdict"] != NOT_RUN] if tables else compared)
    return pd.concat([tables[0], *(compared for compared in tables[1:] if len(compared))], ignore_index=True)


def count_verdicts(comparison: pd.DataFrame) -> dict[str, dict[str, int]]:
    """How many quantities of each kind got each verdict: {kind: {verdict: count}}, without zeros.

    Each quantity counts once a machine. Where several records are one quantity (`same_as`), the worst verdict of those
    that were run counts.
    """
    counted = _once(comparison, comparison["verdict"].map(_badness))
    found = {kind: counted.loc[counted["kind"] == kind, "verdict"].value_counts() for kind in KINDS}
    return {
        kind: {verdict: int(number[verdict]) for verdict in VERDICTS if verdict in number}
        for kind, number in found.items()
        if len(number)
    }


def score(comparison: pd.DataFrame) -> dict[str, object]:
    """How far the predictions on the paper's machine are off; {} if there are none.

    n: quantities predicted; median_error and largest_error: |ours / published - 1|; largest: the claim that is
    farthest off. Limits and stand-ins have no such error and are left out. Each quantity counts once, with the largest
    error of its records. Where the comparison has a null model: null_median_error and null_largest_error of its
    numbers for the same claims.
    """
    first = _first_machine(comparison)
    predicted = comparison["kind"].eq("prediction") & comparison["ratio"].notna() & comparison["bound"].isna()
    chosen = comparison[predicted & ~comparison["stand_in"].astype(bool) & first]
    if chosen.empty:
        return {}
    errors = chosen.assign(error=(chosen["ratio"].astype(float) - 1).abs())
    found = _once(errors, errors["error"])
    farthest = found.loc[found["error"].idxmax()]
    result = {
        "n": len(found),
        "median_error": float(found["error"].median()),
        "largest_error": float(farthest["error"]),
        "largest": farthest["claim"],
    }
    if "null_ratio" in chosen and chosen["null_ratio"].notna().all():
        guessed = errors.assign(error=(chosen["null_ratio"].astype(float) - 1).abs())
        off = _once(guessed, guessed["error"])["error"]
        result |= {"null_median_error": float(off.median()), "null_largest_error": float(off.max())}
    return result


def prediction_words(comparison: pd.DataFrame) -> str:
    """The score in words: how many predictions, how far off, and how far the null model is; "no predictions"."""
    found = score(comparison)
    if not found:
        return "no predictions"
    words = (
        f"{found['n']} predictions, off by {found['median_error']:.0%} (median) and {found['largest_error']:.0%} "
        f"(at most, {found['largest']})"
    )
    if "null_median_error" in found:
        words += (
            f", where bytes over links and nothing else are off by {found['null_median_error']:.0%} and "
            f"{found['null_largest_error']:.0%}"
        )
    return words


def score_sentence(comparison: pd.DataFrame) -> str:
    """Verdicts by kind and the predictions' score in words, for a notebook to print."""
    if comparison.empty:
        return "The paper prints no number of this figure."
    kinds = count_verdicts(comparison).items()
    verdicts = (f"{kind}: {', '.join(f'{count} {name}' for name, count in counts.items())}" for kind, counts in kinds)
    return f"{'; '.join(verdicts)}. On the machine of the paper: {prediction_words(comparison)}."


def verdict_table(comparison: pd.DataFrame) -> pd.DataFrame:
    """To be looked at: the columns that a reader needs, numbers to three digits after the point."""
    wanted = ["claim", "kind", "verdict", "published", "ours", "null", "unit", "profile", "evidence", "reason"]
    numbers = [name for name in ("published", "ours", "null") if name in comparison]
    rounded = comparison.assign(**{name: comparison[name].astype(float).round(3) for name in numbers})
    return rounded[[name for name in wanted if name in comparison]].fillna({"reason": ""})


def _first_machine(comparison: pd.DataFrame) -> pd.Series:
    """Which rows are of the first machine of their paper."""
    if "profile" not in comparison:
        return pd.Series(True, comparison.index)
    papers = comparison["paper"] if "paper" in comparison else pd.Series("", comparison.index)
    first = comparison["profile"].groupby(papers).transform("first")  # skips rows of no machine
    return comparison["profile"].fillna("") == first.fillna("")


def _compare(table: pd.DataFrame, record: dict, records: dict[str, dict]) -> dict:
    row, stand_in = _counterpart(table, record)
    if row is not None and pd.isna(row[record["column"]]):
        row = None  # such a stage has no such number
    ours = float(row[record["column"]]) if row is not None else None
    verdict = NOT_RUN if row is None else _verdict(table, record, records, row, stand_in)
    return {
        "claim": record["id"],
        "kind": record["kind"],
        "same_as": _or(record.get("same_as"), None),
        "quantity": record["quantity"],
        "unit": record["unit"],
        "conditions": record["conditions"] + ("; in words there" if record.get("worded") is True else ""),
        "section": record["section"],
        "bound": _or(record.get("bound"), None),
        "published": record["value"],
        "ours": ours,
        "stand_in": stand_in,
        "evidence": row["evidence"] if row is not None and "evidence" in row else None,
        "ratio": ours / record["value"] if ours is not None and record["value"] else None,
        "verdict": verdict,
        "reason": None if _as_published(verdict, ours, record) else _or(record.get("reason"), None),
    }


def _verdict(table: pd.DataFrame, record: dict, records: dict[str, dict], row: pd.Series, stand_in: bool) -> str:
    ours, bound = float(row[record["column"]]), _or(record.get("bound"), None)
    if bound in ("at_least", "at_most") and _kept(ours, record["value"], bound):
        return SAME_SIGN if stand_in else WITHIN
    if bound == "up_to" and _beyond(ours, record, records):
        return DIFFERS
    if bound not in ("at_least", "at_most") and not stand_in and abs(ours - record["value"]) <= _slack(record):
        return WITHIN
    return _by_effect(table, record, records, row)


def _as_published(verdict: str, ours: float | None, record: dict) -> bool:
    """Whether there is nothing to give a reason for: ours was not run, is within tolerance, or keeps the limit."""
    limit = _or(record.get("bound"), None) in ("at_least", "at_most")
    return verdict in (WITHIN, NOT_RUN) or (limit and _kept(ours, record["value"], record["bound"]))


def _kept(ours: float, limit: float, bound: str) -> bool:
    return ours >= limit if bound == "at_least" else ours <= limit


def _slack(record: dict) -> float:
    return _or(record.get("slack"), _or(record.get("tolerance"), TOLERANCE) * abs(record["value"]))


def _beyond(ours: float, record: dict, records: dict[str, dict]) -> bool:
    """Whether ours goes past an upper end, seen from what the claim is beside."""
    beside = record["beside"]
    gain = record["value"] - (records[beside]["value"] if isinstance(beside, str) else beside)
    return (ours - record["value"]) * math.copysign(1, gain) > _slack(record)


def _by_effect(table: pd.DataFrame, record: dict, records: dict[str, dict], row: pd.Series) -> str:
    """`same effect`, `same sign` or `differs`, by what the claim is beside in the paper and here."""
    column, beside = record["column"], _or(record.get("beside"), None)
    theirs, span = beside, (beside, beside)
    if isinstance(beside, str):
        other = records[beside]
        neighbour, _ = _counterpart(table, other)
        if neighbour is None:
            return DIFFERS
        theirs, beside, span = other["value"], float(neighbour[other["column"]]), _range(neighbour, other["column"])
    if beside is None or math.isnan(beside):
        return DIFFERS
    ours = float(row[column])
    found, published = _effects((ours, beside), (record["value"], theirs))
    if found * published <= 0:
        return DIFFERS
    low, high = _range(row, column)
    apart = low > span[1] or high < span[0]
    return SAME_EFFECT if apart and EFFECT[0] <= found / published <= EFFECT[1] else SAME_SIGN


def _effects(*pairs: tuple[float, float]) -> list[float]:
    """The effect of each (value, baseline): log ratios if all numbers are positive, otherwise differences."""
    if all(value > 0 and math.isfinite(value) for pair in pairs for value in pair):
        return [math.log(value / baseline) for value, baseline in pairs]
    return [value - baseline for value, baseline in pairs]


def _range(row: pd.Series, column: str) -> tuple[float, float]:
    """The range that repetitions of a row's value fall in: itself alone, where the table has no spread.

    `<column>_low` and `<column>_high` give it, or low_s and high_s of `seconds`, or two standard errors of `value`.
    """
    value = float(row[column])
    if row.get("evidence", "measured") != "measured":  # a model has no runs
        return value, value
    for low, high in ((f"{column}_low", f"{column}_high"), *([("low_s", "high_s")] if column == "seconds" else [])):
        if low in row and pd.notna(row[low]) and pd.notna(row[high]):
            return float(row[low]), float(row[high])
    error = ERRORS * float(_or(row.get("standard_error"), 0.0)) if column == "value" else 0.0
    return value - error, value + error


def _counterpart(table: pd.DataFrame, record: dict) -> tuple[pd.Series | None, bool]:
    """The one row of our table that the claim is about, or else its stand-in, and whether it is one."""
    row = _row(table, record, record.get("where"))
    if row is not None:
        return row, False
    row = _row(table, record, record.get("stand_in"))
    return row, row is not None


def _row(table: pd.DataFrame, record: dict, where: object) -> pd.Series | None:
    """The one row with these values, if the table has it and the claim's column."""
    if not isinstance(where, dict) or record.get("column") not in table:
        return None
    if any(name not in table for name in where):
        return None
    chosen = table.loc[(table[list(where)] == pd.Series(where)).all(axis=1)]
    if len(chosen) > 1:
        raise UserError(f"claim {record['id']}: {len(chosen)} rows of the table answer to {where}; expected one")
    return None if chosen.empty else chosen.iloc[0]


def _once(comparison: pd.DataFrame, worse: pd.Series) -> pd.DataFrame:
    """One row a quantity (and a paper and machine, where there are several): the one with the largest `worse`."""
    quantity = comparison["same_as"].where(comparison["same_as"].notna(), comparison["claim"])
    keys = [name for name in ("paper", "profile") if name in comparison]
    ordered = comparison.assign(quantity_id=quantity, worse=worse).sort_values("worse", ascending=False, kind="stable")
    return ordered.drop_duplicates(["quantity_id", *keys]).drop(columns=["quantity_id", "worse"]).sort_index()


def _badness(verdict: str) -> int:
    """Larger for a worse verdict, and least for what was not run."""
    return -1 if verdict == NOT_RUN else VERDICTS.index(verdict)


def _or(value: object, default: object) -> object:
    return default if value is None or (isinstance(value, float) and np.isnan(value)) else value

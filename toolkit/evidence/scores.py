"""The score of a comparison: verdicts counted by kind, how far predictions are off, and all of it in words."""

from collections.abc import Mapping

import pandas as pd

from toolkit.errors import UserError
from toolkit.evidence.claims import KINDS
from toolkit.evidence.comparison import GROUPS, LIMITS, STAND_INS, VALUES, group
from toolkit.evidence.verdicts import NOT_RUN, VERDICTS


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


def _once(comparison: pd.DataFrame, worse: pd.Series) -> pd.DataFrame:
    """One row a quantity (and a paper and machine, where there are several): the one with the largest `worse`."""
    keys = [name for name in ("paper", "profile") if name in comparison]
    ordered = comparison.assign(quantity_id=_quantity, worse=worse).sort_values("worse", ascending=False, kind="stable")
    return ordered.drop_duplicates(["quantity_id", *keys]).drop(columns=["quantity_id", "worse"]).sort_index()


def _quantity(comparison: pd.DataFrame) -> pd.Series:
    """The claim that stands for each row's quantity."""
    return comparison["same_as"].where(comparison["same_as"].notna(), comparison["claim"])

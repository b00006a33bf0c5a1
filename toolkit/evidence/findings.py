"""The first lines of the report: each paper's headline number beside this run's, and the verdict that follows."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from math import inf
from typing import TYPE_CHECKING, Any

import pandas as pd

from toolkit import paths
from toolkit.errors import UserError
from toolkit.evidence.cite import address, of_these_results, read_names, read_table, reference_dir, row_of, value
from toolkit.evidence.claims import TOLERANCE
from toolkit.evidence.comparison import DISTURBED
from toolkit.evidence.verdicts import NOT_RUN, Baseline, Spread, verdict
from toolkit.measure.disturbance import is_disturbed
from toolkit.records import load_yaml

if TYPE_CHECKING:
    from toolkit.evidence.meta import Meta
    from toolkit.evidence.report import Entry

BEYOND = "beyond"  # among the papers: what is asked beyond them
EVIDENCE = re.compile(r"evidence=(\w+)")  # in the address of a finding's number
NUMBERS = ("claim", "here", "bytes", "rival", "price")  # of a finding: the cells `<paper>-claim`, ...
UNUSABLE = "too disturbed to use"
FAULTY = "above what its bytes allow, so the measurement is faulty"
SLACK = 1.05  # times what the bytes allow
HALF = 0.5  # of a notebook's measured rows: if more are disturbed, no number of it is used
FEW = 3  # models that the report names


def findings(entries: Mapping[str, "Entry"]) -> list[dict[str, Any]]:
    """The rows of `data/findings.yaml`: each with its notebook's entry, its evidence, its numbers as texts, a verdict.

    Words in braces are parameters of the notebook's run.
    """
    read_table.cache_clear()  # a sweep has written tables since
    names = of_these_results(read_names())
    return [
        _finding(paper, finding, entries[finding["notebook"]], names)
        for paper, finding in load_yaml(paths.root() / "data" / "findings.yaml").items()
        if paper != BEYOND
    ]


def _finding(paper: str, finding: Mapping[str, str], entry: "Entry", names: Mapping[str, str]) -> dict[str, Any]:
    evidence = EVIDENCE.search(names[f"{paper}-here"])[1]  # type: ignore[index]  # a test holds it to that
    numbers = {kind: _number(f"{paper}-{kind}", names) for kind in NUMBERS}
    here = finding["here"].format_map(entry.about.parameters | entry.meta.parameters)
    about = {"paper": paper, "entry": entry, "evidence": evidence, "numbers": numbers, "here": here}
    return {**finding, **about, "verdict": _verdict(paper, numbers, evidence, entry.meta, names)}


def _verdict(
    paper: str, numbers: Mapping[str, str | None], evidence: str, meta: "Meta", names: Mapping[str, str]
) -> str:
    if numbers["here"] is None:
        return NOT_RUN
    claim, here = float(numbers["claim"] or 0), float(numbers["here"])
    row = row_of(f"{paper}-here", paths.results_dir(), names)
    if evidence == "measured" and (_row_disturbed(row) or meta.disturbed["rows"] > HALF * meta.disturbed["of"]):
        return UNUSABLE
    if evidence == "measured" and numbers["bytes"] and here > SLACK * float(numbers["bytes"]):
        return FAULTY
    column = address(f"{paper}-here", names)[2]
    low = row.get(f"{column}_low")
    ours = Spread(here, here if low is None or pd.isna(low) else float(low), inf)
    # only a number of the paper's own machine can be within the tolerance
    return verdict(ours, claim, TOLERANCE * claim, Baseline(Spread(1, 1, 1), 1), stand_in=evidence != "modelled")


def _row_disturbed(row: pd.Series) -> bool:
    return is_disturbed(row) or row.get("reason") == DISTURBED


def conclusion(found: Sequence[Mapping[str, Any]]) -> str:
    """One sentence: how many of the papers' speed-ups got which verdict, and how often today's best is faster."""
    if not found:
        return ""
    counts = Counter(one["verdict"] for one in found)
    words = ", ".join(f"{count} {verdict}" for verdict, count in counts.most_common())
    usable = [one["numbers"]["rival"] for one in found if one["verdict"] not in (NOT_RUN, UNUSABLE)]
    rivals = [float(number) for number in usable if number]
    faster = (
        f"; today's best software is faster than ours in {sum(it < 1 for it in rivals)} of {len(rivals)}"
        if rivals
        else ""
    )
    return f"Of {len(found)} papers' headline speed-ups: {words}{faster}."


def priced(found: Sequence[Mapping[str, Any]]) -> set[str]:
    """The papers whose findings give a price in quality."""
    return {one["paper"] for one in found if one["numbers"]["price"]}


def real_model(entries: Mapping[str, "Entry"]) -> list[dict[str, Any]]:
    """The entry of `data/findings.yaml` beyond the papers, its cells filled in from kept results, and their machine."""
    finding = load_yaml(paths.root() / "data" / "findings.yaml")[BEYOND]
    names = read_names()
    numbers = {name: value(name, reference_dir(), names) for name in names if name.startswith("real-")}
    texts = {part: finding[part].format_map(numbers) for part in ("sentence", "price")}
    bars = {label: numbers[cell] for label, cell in finding["bars"].items()}
    machine = address(next(iter(finding["bars"].values())), names)[0]
    return [texts | {"bars": bars, "entry": entries[finding["notebook"]], "machine": machine}]


def models_of(parameters: Iterable[Mapping[str, Any]]) -> str:
    """The models of runs and their sizes in words, the most frequent first."""
    counts = Counter(name for one in parameters if isinstance(name := one.get("model"), str))
    words = [_with_size(name) for name, _ in counts.most_common(FEW)]
    more = len(counts) - len(words)
    return "; ".join(words) + (f"; and {more} more" if more > 0 else "")


def _with_size(name: str) -> str:
    from toolkit.models import MODELS  # torch, which a sweep does without
    from toolkit.models.architectures import ARCHITECTURES

    if name in MODELS:
        return f"{name} ({MODELS[name].weights / 1e6:,.0f} million weights)"
    if name in ARCHITECTURES:
        return f"{name}'s shapes ({sum(ARCHITECTURES[name].parameters.values()) / 1e9:.1f} billion weights)"
    return name


def _number(cell: str, names: Mapping[str, str]) -> str | None:
    """The text of a cell of these results; None if they do not have it."""
    try:
        return value(cell, paths.results_dir(), names)
    except (UserError, OSError, ValueError, TypeError):  # not run, or a table of an older version
        return None

"""Every kept score from the files `comparison.csv` alone: a slow, obvious oracle without pandas or the toolkit.

python tests/naive_score.py results/reference/epyc-zen4-2c
"""

import csv
import statistics
import sys
from pathlib import Path


def rows(folder: Path, paper: str) -> list[dict[str, str]]:
    """The rows of all comparisons of a paper."""
    found = []
    for file in sorted((folder / paper).glob("*/comparison.csv")):
        with file.open(encoding="utf-8", newline="") as lines:
            found += csv.DictReader(lines)
    return found


def is_stand_in(row: dict[str, str]) -> bool:
    """Whether another model, or another machine than the paper's, stands for what the claim is about."""
    return row["stand_in"] == "True" or row["profile"] == "this-machine"


def errors(chosen: list[dict[str, str]], column: str) -> list[float]:
    """The largest error of each quantity and machine."""
    worst: dict[tuple[str, str], float] = {}
    for row in chosen:
        key = row["same_as"] or row["claim"], row["profile"]
        worst[key] = max(worst.get(key, 0.0), abs(float(row[column]) - 1))
    return list(worst.values())


def median_and_largest(off: list[float]) -> str:
    """Both as percentages."""
    return f"{statistics.median(off):.0%} and {max(off):.0%}"


def score(folder: Path, paper: str) -> dict[str, object]:
    """n, the errors of the model and of the null model, and what is left out."""
    predicted = [row for row in rows(folder, paper) if row["kind"] == "prediction"]
    run = [row for row in predicted if row["ours"]]
    chosen = [
        row
        for row in run
        if row["evidence"] == "modelled" and row["ratio"] and not row["bound"] and not is_stand_in(row)
    ]
    limits = [row for row in run if row["bound"] and not is_stand_in(row)]
    stand_ins = [row for row in run if is_stand_in(row)]
    quantities, answered = ({row["same_as"] or row["claim"] for row in some} for some in (predicted, run))
    result: dict[str, object] = {
        "n": len(errors(chosen, "ratio")) if chosen else 0,
        "limits": len({(row["same_as"] or row["claim"], row["profile"]) for row in limits}),
        "stand_ins": len({(row["same_as"] or row["claim"], row["profile"]) for row in stand_ins}),
        "not_run": len(quantities - answered),
        "quantities": len(quantities),
    }
    if chosen:
        result["off"] = median_and_largest(errors(chosen, "ratio"))
    reached = [row for row in chosen if row["null_ratio"]]
    if reached:
        result["null_off"] = median_and_largest(errors(reached, "null_ratio"))
        result["null_n"] = len(errors(reached, "null_ratio"))
        result["same_off"] = median_and_largest(errors(reached, "ratio"))
    return result


if __name__ == "__main__":
    for paper in sorted(folder for folder in Path(sys.argv[1]).iterdir() if list(folder.glob("*/comparison.csv"))):
        print(paper.name, score(Path(sys.argv[1]), paper.name))

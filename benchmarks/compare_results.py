"""Differences between the tables of two sweeps: before and after a change that should change nothing.

    python benchmarks/compare_results.py BEFORE/results AFTER/results [--timings]

Rows are matched by their text columns, in order where these do not tell them apart. Each line is a column of a
notebook: how many rows differ, by how much at most, or rows that only one side has. Columns that a clock decides and
numbers of the machine that was probed are left out unless asked for. Ends with 1 if anything differs.
"""

import argparse
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd

# names of columns that a clock decides, or that are made of such columns
TIMED = re.compile(
    r"(.*_)?(s|ms|seconds|gb_s|ns|at)(_low|_high)?|.*seconds.*|.*speedup.*|time_over_.*|bandwidth_over_.*|share_percent|"
    r"share_of_.*|modelled_over_measured|read_share|tokens_per_s(_low|_high)?|.*over_(rival|fc1|other|saved_copy|split)(_low|_high)?|"
    r"low|high|second|token_ms|fault|mode|reader|instructions_s|bytes_s|ops_s"
)
MEASURED_HERE = ("this-machine",)


def main() -> int:
    """Print the differences."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--timings", action="store_true", help="compare columns that a clock decides, too")
    options = parser.parse_args()
    lines = list(differences(options.before, options.after, options.timings))
    print("\n".join(lines) or "no difference")
    return bool(lines)


def differences(before: Path, after: Path, timings: bool = False) -> Iterator[str]:
    """A line for each notebook that only one side has, and for each difference of two tables."""
    tables = {side: _tables(side) for side in (before, after)}
    for name in sorted(set(tables[before]) | set(tables[after])):
        if name not in tables[before] or name not in tables[after]:
            yield f"{name}: only {'after' if name in tables[after] else 'before'}"
            continue
        pair = [pd.read_csv(tables[side][name], low_memory=False) for side in (before, after)]
        yield from (f"{name}: {words}" for words in _compared(*pair, timings))


def _tables(folder: Path) -> dict[str, Path]:
    """Each notebook's table, but for runs in JupyterLab and kept results."""
    files = {file.parent.relative_to(folder): file for file in folder.glob("**/table.csv")}
    return {str(name): file for name, file in files.items() if name.parts[0] not in ("lab", "reference")}


def _compared(before: pd.DataFrame, after: pd.DataFrame, timings: bool) -> Iterator[str]:
    for side, one, other in (("before", before, after), ("after", after, before)):
        if lacking := [name for name in one if name not in other]:
            yield f"columns only {side}: {', '.join(lacking)}"
    shared = [name for name in before if name in after]
    untimed = [name for name in shared if not TIMED.fullmatch(name)]
    labels = [name for name in untimed if before[name].dtype.kind not in "f" and after[name].dtype.kind not in "f"]
    texts = [name for name in labels if before[name].dtype.kind not in "iu"] or labels
    left, right = (_keyed(table, texts) for table in (before, after))
    for side, one, other in (("before", left, right), ("after", right, left)):
        if alone := len(one.index.difference(other.index)):
            yield f"rows only {side}: {alone} of {len(one)}"
    common = left.index.intersection(right.index)
    left, right = left.loc[common], right.loc[common]
    for name in shared if timings else untimed:
        yield from _column(name, left, right, timings)


def _keyed(table: pd.DataFrame, labels: list[str]) -> pd.DataFrame:
    words = table[labels].fillna("").astype(str)
    number = words.groupby(labels).cumcount() if labels else pd.Series(range(len(table)))
    return table.set_axis(words.agg("|".join, axis=1).str.cat(number.astype(str), sep="|"))


def _column(name: str, before: pd.DataFrame, after: pd.DataFrame, timings: bool) -> Iterator[str]:
    one, other = before[name], after[name]
    if not timings and "profile" in before:
        here = before["profile"].isin(MEASURED_HERE)
        one, other = one[~here], other[~here]
    if one.dtype.kind in "fiu" and other.dtype.kind in "fiu":
        one, other = one.astype(float), other.astype(float)
        differ = (one != other) & ~(one.isna() & other.isna())
        with np.errstate(all="ignore"):
            most = ((one - other).abs() / np.maximum(one.abs(), other.abs()))[differ].max()
        size = f", by {most:.1e} at most"
    else:
        differ, size = one.fillna("").astype(str) != other.fillna("").astype(str), ""
    if differ.any():
        row = differ.idxmax()
        yield f"{name}: {differ.sum()} of {len(one)} rows differ{size}; {one[row]!r} → {other[row]!r} at {row[:90]}"


if __name__ == "__main__":
    raise SystemExit(main())

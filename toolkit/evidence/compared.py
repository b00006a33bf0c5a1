"""The table of `run --compare --csv` as a picture: `python -m toolkit.evidence.compared TABLE.csv PICTURE.png`.

A mark a way of running one model within one limit of memory: tokens a second, with the range of the turns, against
perplexity. Up and to the left is better.
"""

import argparse
import sys
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from toolkit.errors import UserError, run_command
from toolkit.evidence.figures import COLUMN_IN, use_style
from toolkit.files import replacing
from toolkit.records import load_csv

ENDS = ["tokens_per_s_low", "tokens_per_s_high"]
NAMES = ("way", "tokens_per_s", *ENDS, "perplexity", "model", "limit")
COLUMNS = {name: str if name in ("way", "model", "limit") else float for name in NAMES}
LINE = 0.05  # of the fastest way's tokens a second: the height of a label
RIVAL = "llama.cpp"  # how the ways of another program begin


def draw(table: pd.DataFrame) -> Figure:
    """The picture of a table with `COLUMNS`: of the rows whose numbers are finite. Raises `UserError` without any."""
    table = table[
        np.isfinite(table[[name for name, kind in COLUMNS.items() if kind is float]].astype(float)).all(axis=1)
    ]
    if table.empty:
        raise UserError("the table has no rows of finite numbers; expected one a way of running the model")
    use_style()
    table = table.astype({"way": str})
    figure = Figure(figsize=(COLUMN_IN, COLUMN_IN * 0.6), layout="constrained")
    axes = figure.add_subplot()
    for ours, rows in table.groupby(~table["way"].str.startswith(RIVAL)):
        ends = [(rows[end] - rows["tokens_per_s"]).abs() for end in ENDS]
        style = {"fmt": "o", "color": "C0"} if ours else {"fmt": "s", "color": "C1", "markerfacecolor": "white"}
        axes.errorbar(
            rows["perplexity"], rows["tokens_per_s"], yerr=ends, label="this toolkit" if ours else RIVAL, **style
        )
    for row, height in zip(table.itertuples(), _label_heights(table), strict=True):
        place = (row.perplexity, height)
        axes.annotate(row.way, place, (7, -3), textcoords="offset points", fontsize=9)
    first = table.iloc[0]
    axes.set(xlabel="perplexity (lower is better)", ylabel="tokens/s (higher is better)", ylim=(0, None))
    axes.set_title(f"{first['model']}, weights within {first['limit']}" if pd.notna(first["limit"]) else first["model"])
    axes.margins(x=0.25)
    axes.legend()
    return figure


def _label_heights(table: pd.DataFrame) -> list[float]:
    """Where labels stand, in tokens a second: beside their marks, and above the label below where marks are close."""
    step, heights, last = LINE * table["tokens_per_s"].max(), {}, {}
    for row in table.sort_values("tokens_per_s").itertuples():
        heights[row.Index] = max(row.tokens_per_s, last.get(round(row.perplexity), -step) + step)
        last[round(row.perplexity)] = heights[row.Index]
    return [heights[index] for index in table.index]


def main(arguments: list[str] | None = None) -> int:
    """Draw a table."""
    parser = argparse.ArgumentParser(prog="python -m toolkit.evidence.compared", description=__doc__)
    parser.add_argument("table", type=Path)
    parser.add_argument("picture", type=Path)
    options = parser.parse_args(arguments)

    def run() -> None:
        figure = draw(load_csv(options.table, COLUMNS))
        with replacing(options.picture) as file:
            figure.savefig(file, format="png", dpi=150)

    return run_command(run)


if __name__ == "__main__":
    sys.exit(main())

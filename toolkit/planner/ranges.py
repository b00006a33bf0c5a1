"""How far measured speeds lie from the planner's predictions, by kind of way.

`data/quality/ranges.csv` has a row for each kind that `beyond/planner` has raced often enough. Columns: kind (of
`toolkit.planner.ways`); low and high, the quantiles `ENDS` of measured over predicted tokens a second; measurements,
their number; machines. `python -m toolkit.planner.prices` writes it from the kept results, beside the prices.
"""

from functools import cache
from pathlib import Path

import pandas as pd

from toolkit import paths

READS = ("data/quality/ranges.csv",)
ENDS = (0.1, 0.9)
FEWEST = 4  # measurements that make a range
RACED = "beyond/planner/table.csv"  # in the kept results of a machine


def ranges_file() -> Path:
    """Where the ranges are."""
    return paths.root() / "data" / "quality" / "ranges.csv"


@cache  # a plan asks once for each table
def load_ranges() -> dict[str, tuple[float, float]]:
    """By kind of way, the ratios measured / predicted between which four of five measurements lie."""
    return {row.kind: (row.low, row.high) for row in pd.read_csv(ranges_file()).itertuples()}


def make_ranges(folder: Path) -> pd.DataFrame:
    """The ranges in the kept results of a folder, which has one folder a machine; turns beside other work are left out.

    Kinds with fewer than `FEWEST` measurements have none.
    """
    files = sorted(folder.glob(f"*/{RACED}"))
    races = [pd.read_csv(file, low_memory=False).query("part == 'race' and disturbed < 0.5") for file in files]
    table = pd.concat(races) if races else pd.DataFrame(columns=["kind", "tokens_per_s", "predicted_per_s"])
    machines, rows = " ".join(file.parents[2].name for file in files), []
    for kind, ratios in (table["tokens_per_s"] / table["predicted_per_s"]).groupby(table["kind"]):
        if len(ratios) >= FEWEST:
            rows.append((kind, *ratios.quantile([*ENDS]), len(ratios), machines))
    return pd.DataFrame(rows, columns=["kind", "low", "high", "measurements", "machines"])

"""How well the cost models predict, over all notebooks: the papers' numbers, and what was measured on this machine."""

from collections.abc import Iterable, Iterator
from pathlib import Path

import pandas as pd

from toolkit.costs.machine import THIS_MACHINE
from toolkit.costs.stage_tables import model_error
from toolkit.evidence.catalogue import notebooks
from toolkit.evidence.comparison import COLUMNS, omissions, score
from toolkit.files import replacing

READS = ("io_ms", "gb_s", "value")  # the number of a table of reads, and the columns that name its rows
READ_KEYS = ("way", "window", "layout", "pattern", "chunk_bytes", "threads")
ALL = "all together"


def write_scores(folder: Path) -> None:
    """Write two tables beside one machine's kept results: `scores.csv` and `model_error.csv`.

    `scores` is `score_table` of its comparisons; `model_error` has a row a notebook, and one for all together, with the
    fields of `toolkit.costs.stage_tables.model_error`.
    """
    for name, table in (("scores", score_table(comparisons(folder))), ("model_error", model_errors(folder))):
        with replacing(folder / f"{name}.csv") as file:
            table.to_csv(file, index=False)


def score_table(comparisons: pd.DataFrame) -> pd.DataFrame:
    """A row a paper that has predictions: the fields of `score`, then what it leaves out, those of `omissions`."""
    papers = comparisons.groupby("paper", sort=False)
    rows = [{"paper": paper} | score(found) | omissions(found) for paper, found in papers]
    return pd.DataFrame([row for row in rows if row["quantities"]])


def read_results(folder: Path, name: str, ids: Iterable[str] | None = None) -> Iterator[tuple[str, pd.DataFrame]]:
    """Id and `<name>.csv` of all notebooks, or of these, that have one in a folder of results."""
    for id in notebooks() if ids is None else ids:
        if (file := folder / id / f"{name}.csv").is_file():
            yield id, pd.read_csv(file, low_memory=False)


def comparisons(folder: Path) -> pd.DataFrame:
    """Every notebook's comparison, with its paper."""
    columns = [*COLUMNS, "paper"]
    found = [(table, id.split("/")[0]) for id, table in read_results(folder, "comparison") if len(table)]
    tables = [table.assign(paper=paper).reindex(columns=columns) for table, paper in found]
    return pd.concat(tables, ignore_index=True) if tables else pd.DataFrame(columns=columns)


def model_errors(folder: Path) -> pd.DataFrame:
    """A row a notebook whose table has both what was modelled for this machine and what was measured on it."""
    predicted = {id: modelled_over_measured(table) for id, table in read_results(folder, "table")}
    predicted = {id: ratios for id, ratios in predicted.items() if len(ratios)}
    if predicted:
        predicted[ALL] = pd.concat(predicted.values())
    return pd.DataFrame([{"notebook": id, **model_error(table)} for id, table in predicted.items()])


def modelled_over_measured(table: pd.DataFrame) -> pd.DataFrame:
    """Rows with `stage` and `modelled_over_measured`: of stages, of products beside their limits, or of reads.

    The model of SpQR's products is the larger of their two limits, bytes and instructions.
    """
    if "modelled_over_measured" in table or "profile" not in table:
        return table if "modelled_over_measured" in table else table[:0]
    if "instructions_s" in table:
        ratio = table[["bytes_s", "instructions_s"]].max(axis=1) / table["seconds"]
        ratio = ratio[table["profile"].eq(THIS_MACHINE)].dropna()
    else:
        mine = table[table["profile"] == THIS_MACHINE]
        number, keys = next((name for name in READS if name in mine), None), [key for key in READ_KEYS if key in mine]
        if not number or not keys or {"measured", "modelled"} - set(mine["evidence"]):
            return table[:0]
        wide = mine.groupby([*keys, "evidence"], dropna=False)[number].first().unstack()
        ratio = (wide["modelled"] / wide["measured"]).dropna()
    return pd.DataFrame({"stage": "read or product", "modelled_over_measured": ratio})

"""Tables over all notebooks: numbers, published ones beside ours, and how well the cost models predict.

Perplexity, accuracy and latency (`results/tables/*.csv`) have a row a number and the columns `COLUMNS`. Times are in
seconds, whatever the notebook's unit. `settings` holds the columns that tell the rows of one notebook apart, as
`name=value`. `machine` is the profile that a number was modelled for, or the CPU that it was measured on; `cpu`,
`commit` and `finished` say where, by which code and when the notebook ran.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import pandas as pd

from toolkit.evidence.catalogue import notebooks
from toolkit.evidence.columns import SECONDS, Column, column, dictionary
from toolkit.evidence.comparison import COLUMNS as COMPARED
from toolkit.evidence.meta import Meta, read_meta
from toolkit.evidence.scores import omissions, score
from toolkit.evidence.stage_tables import model_error
from toolkit.files import make_folder, write_csv
from toolkit.machines.machine import THIS_MACHINE
from toolkit.records import load_csv

COLUMNS = [
    *("notebook", "quantity", "statistic", "value", "unit", "model", "method", "settings", "evidence", "disturbed"),
    *("machine", "cpu", "commit", "finished"),
]
METHODS = ("method", "contestant", "quantiser", "label", "way")  # the columns that may name one, the first that does
ALWAYS = ("corpus", "sequence_length")  # a perplexity means nothing without them
APART = {*COLUMNS, *METHODS, "profile", "measured_at", "metric", "stage"}
ERROR = "standard error"
ALL = "all together"
Numbers = Iterator[tuple[pd.Series, str, str, str]]  # values, and their quantity, statistic and unit


def write_tables(results: Path) -> Path:
    """Write `tables/` in a folder of results: the three tables; `comparison.csv`, all published numbers beside
    ours; and `columns.csv`, the dictionary of the columns that the notebooks' tables have.

    `results` is laid out as the sweep's results or as one machine's kept ones are: `<id>/table.csv` and `meta.json`.
    """
    folder = make_folder(results / "tables")
    for name, table in (combined_tables(results) | {"comparison": comparisons(results)}).items():
        write_csv(folder / f"{name}.csv", table)
    tables = read_results(results, "table")
    found = {
        (name, id if (name, id) in dictionary() else ""): column(name, id) for id, table in tables for name in table
    }
    rows = [(*place, known.unit, known.meaning) for place, known in found.items() if known]
    write_csv(folder / "columns.csv", pd.DataFrame(rows, columns=["column", "notebook", "unit", "meaning"]))
    return folder


def combined_tables(results: Path, ids: Iterable[str] | None = None) -> dict[str, pd.DataFrame]:
    """The tables by name, from all notebooks whose results are there, or from these alone."""
    parts: dict[str, list[pd.DataFrame]] = {name: [] for name in TABLES}
    for id, table in read_results(results, "table", ids):
        meta = read_meta(results / id)
        for name, numbers in TABLES.items():
            parts[name] += [_tidy(table, id, meta, *one) for one in numbers(table, id)]
    return {
        name: pd.concat(tables, ignore_index=True)[COLUMNS] if tables else pd.DataFrame(columns=COLUMNS)
        for name, tables in parts.items()
    }


def _tidy(table: pd.DataFrame, id: str, meta: Meta, values: pd.Series, quantity, statistic: str, unit: str):
    """One column's numbers as rows of a combined table; `quantity` is a name, or one for each row."""
    rows = table.loc[values.index]
    names = [name for name in METHODS if name in rows]
    method = rows[names].bfill(axis=1).iloc[:, 0] if names else None
    places = rows.reindex(columns=["profile", "machine"]).astype(object)
    machine = places.mask(places.eq(THIS_MACHINE)).bfill(axis=1).iloc[:, 0]
    measured = rows["evidence"].eq("measured")
    shared = {"notebook": id, "unit": unit, "cpu": meta.machine, "commit": meta.commit, "finished": meta.finished}
    made = pd.DataFrame(index=rows.index).assign(value=values, quantity=quantity, **shared)
    made["statistic"] = pd.Series(statistic, rows.index).where(measured | (statistic != "median"), "value")
    made["machine"] = machine.mask(measured | places["profile"].eq(THIS_MACHINE), meta.machine)
    made["model"] = rows["model"] if "model" in rows else meta.parameters.get("model")
    return made.assign(
        method=method,
        settings=_settings(table, id, meta, () if unit == "s" else ALWAYS).loc[rows.index],
        evidence=rows["evidence"],
        disturbed=rows.get("disturbed"),
    )


def _settings(table: pd.DataFrame, id: str, meta: Meta, always: Sequence[str]) -> pd.Series:
    """The labels that tell the rows of a table apart, beside model, method and machine: `layer=3; policy=pipelined`."""
    table = table.assign(**{name: meta.parameters[name] for name in always if name in meta.parameters.keys() - table})
    known = {name: column(name, id) or Column("number", "") for name in table if name not in APART}
    several = [name for name, meaning in known.items() if meaning.names_rows and table[name].nunique(dropna=False) > 1]
    keys = list(dict.fromkeys([*several, *(name for name in always if name in table)]))
    words = [f"{name}=" + table[name].map(_plain) for name in keys]
    present = [word.where(table[name].notna()) for name, word in zip(keys, words, strict=True)]
    return pd.Series(
        ["; ".join(word for word in row if isinstance(word, str)) for row in zip(*present, strict=True)]
        if present
        else "",
        table.index,
        dtype=object,
    )


def _plain(value: object) -> str:
    """A value as text: whole numbers without a point."""
    return f"{value:.0f}" if isinstance(value, float) and value.is_integer() else str(value)


def _latency(table: pd.DataFrame, id: str) -> Numbers:
    """Every column of times that has a quantity; of the total, the row's stage if it has one."""
    for name in table:
        known = column(name, id)
        if known is None or known.quantity is None:
            continue
        values = table[name].dropna() * SECONDS[known.unit]
        quantity: object = known.quantity
        if "stage" in table and quantity == "total":
            quantity = table["stage"].fillna("total").loc[values.index]
        if len(values):
            yield values, quantity, known.statistic, "s"


def _perplexity(table: pd.DataFrame, id: str) -> Numbers:
    """Perplexities, and their standard errors."""
    if "perplexity" in table:
        values = table["perplexity"].dropna()
    elif "metric" in table:
        values = table["value"][table["metric"].eq("perplexity")].dropna()
    else:
        return
    if len(values):
        yield values, "perplexity", "value", "perplexity"
        own = "value" not in table or values.name == "value"  # else the error is that of an accuracy
        yield from _errors(table.loc[values.index], "perplexity", "perplexity", own)


def _accuracy(table: pd.DataFrame, id: str) -> Numbers:
    """Shares of a task's items that are right, what chance gives, and standard errors."""
    if not {"chance", "value"} <= set(table) or not {"metric", "task"} & set(table):
        return
    rows = table[table["chance"].notna() & table["value"].notna()]
    if rows.empty:
        return
    quantity = rows["task"] if "task" in rows else rows["metric"]
    yield rows["value"], quantity, "value", "share"
    yield rows["chance"], quantity, "chance", "share"
    yield from _errors(rows, quantity, "share", True)


def _errors(rows: pd.DataFrame, quantity, unit: str, own: bool) -> Numbers:
    if own and "standard_error" in rows and rows["standard_error"].notna().any():
        values = rows["standard_error"].dropna()
        yield values, quantity if isinstance(quantity, str) else quantity.loc[values.index], ERROR, unit


TABLES: dict[str, Callable[[pd.DataFrame, str], Numbers]] = {
    "perplexity": _perplexity,
    "accuracy": _accuracy,
    "latency": _latency,
}


def write_scores(folder: Path) -> None:
    """Write two tables beside one machine's kept results: `scores.csv` and `model_error.csv`.

    `scores` is `score_table` of its comparisons; `model_error` has a row a notebook, and one for all together, with the
    fields of `toolkit.evidence.stage_tables.model_error`. One without rows is not written.
    """
    for name, table in {"scores": score_table(comparisons(folder)), "model_error": model_errors(folder)}.items():
        if len(table):
            write_csv(folder / f"{name}.csv", table)


def score_table(comparisons: pd.DataFrame) -> pd.DataFrame:
    """A row a paper that has predictions: the fields of `score`, then what it leaves out, those of `omissions`."""
    papers = comparisons.groupby("paper", sort=False)
    rows = [{"paper": paper} | score(found) | omissions(found) for paper, found in papers]
    return pd.DataFrame([row for row in rows if row["quantities"]])


def read_results(folder: Path, name: str, ids: Iterable[str] | None = None) -> Iterator[tuple[str, pd.DataFrame]]:
    """Id and `<name>.csv` of all notebooks, or of these, that have one in a folder of results."""
    for id in notebooks() if ids is None else ids:
        if (file := folder / id / f"{name}.csv").is_file():
            yield id, load_csv(file)


def comparisons(folder: Path, ids: Iterable[str] | None = None) -> pd.DataFrame:
    """Every notebook's comparison, or those of these notebooks, with their paper."""
    columns = [*COMPARED, "paper"]
    found = [(table, id.split("/")[0]) for id, table in read_results(folder, "comparison", ids) if len(table)]
    tables = [table.assign(paper=paper).reindex(columns=columns) for table, paper in found]
    return pd.concat(tables, ignore_index=True) if tables else pd.DataFrame(columns=columns)


def model_errors(folder: Path) -> pd.DataFrame:
    """A row a notebook whose table has both what was modelled for this machine and what was measured on it."""
    predicted = {id: table for id, table in read_results(folder, "table") if "modelled_over_measured" in table}
    if predicted:
        predicted[ALL] = pd.concat(predicted.values())
    return pd.DataFrame([{"notebook": id, **model_error(table)} for id, table in predicted.items()])

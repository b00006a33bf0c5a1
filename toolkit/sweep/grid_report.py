"""The results of a grid beside its points: one table, a figure a notebook, and a page with links to every run.

Columns that begin with `grid_` are the grid's parameters.
"""

from collections.abc import Mapping
from pathlib import Path

import pandas as pd
from pandas.api.types import is_bool_dtype, is_numeric_dtype

from toolkit import paths
from toolkit.evidence.catalogue import parameter_words
from toolkit.evidence.figures import COLUMN_IN, save_figure, use_style
from toolkit.evidence.meta import read_meta
from toolkit.evidence.page import png_uri, render
from toolkit.evidence.report import carry, publish_page
from toolkit.evidence.tables import combined_tables
from toolkit.extras import extra
from toolkit.files import make_folder, write_csv
from toolkit.sweep import driver, state
from toolkit.sweep.grid import ParameterGrid
from toolkit.sweep.jobs import Job

with extra("lab"):
    import matplotlib.pyplot as plt
    import seaborn as sns
    from matplotlib.figure import Figure

LINEAR = 30  # largest over smallest number of a figure that a linear axis shows


def write_report(
    grid: ParameterGrid,
    changed: Mapping[str, object],
    jobs: list[Job],
    rebuild: bool = False,
    running: bool = False,
) -> Path:
    """Write the grid's tables, its figures and `report/`, with a page a notebook and point; return the index.

    `changed` are parameters of all points. A notebook whose numbers are the same at all points is named, with the
    columns of its table that vary. `rebuild` converts the executed notebooks anew. While notebooks are `running`,
    `tables/` stays as it is.
    """
    results = paths.results_dir()
    folder = make_folder(results / "report")
    numbers = numbers_table(grid, jobs)
    write_csv(results / "grid.csv", numbers)
    carry([results / "grid.csv"], folder)
    steady = []
    if not running:
        tables = grid_tables(grid, jobs)
        for name, table in tables.items():
            write_csv(make_folder(results / "tables") / f"{name}.csv", table)
        steady = [f"{id}: {words}" for id, words in told_steady(numbers, tables).items()]
        print("".join(f"{line}\n" for line in steady), end="")
    use_style()
    pages = {(job.row, job.point): _page(job, folder, rebuild) for job in jobs}
    render(
        "grid.html",
        folder / "index.html",
        grid=grid.values,
        changed=parameter_words(changed),
        steady=steady,
        runs=len(jobs),
        columns=[name for name in numbers if name not in ("point", "error")],
        rows=[(row, pages[row["notebook"], row["point"]]) for row in numbers.to_dict("records")],
        pictures=_draw(grid, numbers, results / "figures"),
        tables=[file.name for file in carry(sorted((results / "tables").glob("*.csv")), folder / "tables")],
    )
    return folder / "index.html"


def numbers_table(grid: ParameterGrid, jobs: list[Job]) -> pd.DataFrame:
    """A row for each of the few numbers that stand for a notebook on the report's index, at each point.

    Columns: notebook, point, the grid's parameters, status, seconds, error; `quantity`, which says what the numbers are
    with unit and evidence, `label` and `value`. A run without results, or with results out of date, has one row without
    a number.
    """
    rows = []
    for job in jobs:
        last, card = state.load(job.id), read_meta(job.folder).card if job.is_fresh() else None
        run = {
            "notebook": job.row,
            "point": job.point,
            **_parameters(grid, job),
            "status": driver.status(job, last),
            "seconds": last and last.seconds,
            "error": last and last.error,
        }
        bars = card["bars"].items() if card else [(None, None)]
        rows += [run | {"quantity": card and card["caption"], "label": label, "value": value} for label, value in bars]
    return pd.DataFrame(rows)


def grid_tables(grid: ParameterGrid, jobs: list[Job]) -> dict[str, pd.DataFrame]:
    """The tables of all points together: perplexity, accuracy and latency, and each notebook's own table by its id."""
    parts: dict[str, list[pd.DataFrame]] = {}
    for job in jobs:
        if not job.is_fresh():
            continue
        own = pd.read_csv(job.folder / "table.csv", low_memory=False)
        shared = combined_tables(paths.results_dir() / job.point, [job.row])
        for name, table in {**shared, job.row.replace("/", "-"): own}.items():
            if len(table):
                parts.setdefault(name, []).append(pd.DataFrame(_parameters(grid, job), table.index).join(table))
    return {name: pd.concat(tables, ignore_index=True) for name, tables in parts.items()}


def told_steady(numbers: pd.DataFrame, tables: Mapping[str, pd.DataFrame]) -> dict[str, str]:
    """A sentence by the id of each notebook whose shown numbers are the same at all of its points, two or more."""
    told = {}
    for id, rows in numbers.dropna(subset="value").groupby("notebook", sort=False):
        by_point = rows.groupby("point")["value"].agg(tuple)
        if len(by_point) > 1 and by_point.nunique() == 1:
            table = tables[str(id).replace("/", "-")]
            points = [part for _, part in table.groupby([name for name in table if name.startswith("grid_")])]
            own = [name for name in table if not name.startswith("grid_")]
            varying = [name for name in own if len({tuple(map(str, part[name])) for part in points}) > 1]
            which = f"columns of its table that vary: {', '.join(varying)}" if varying else "nor does its table vary"
            told[str(id)] = f"no number that is shown depends on the grid; {which}"
    return told


def figure(grid: ParameterGrid, numbers: pd.DataFrame) -> Figure:
    """One notebook's numbers over the first parameter, with a panel for each combination of the others.

    A line joins the numbers that have the same place in the notebook's list. Its name has all labels that they have.
    """
    x, *others = (f"grid_{name}" for name in grid.values)
    place = numbers.groupby("point", sort=False).cumcount()
    names = numbers.groupby(place)["label"].transform(lambda labels: " / ".join(labels.unique()))
    numeric = is_numeric_dtype(numbers[x]) and not is_bool_dtype(numbers[x])
    shown = numbers.assign(**{" ": names, x: numbers[x] if numeric else numbers[x].astype(str)})
    panels = numbers[others].astype(str).agg(", ".join, axis=1) if others else ""
    axes = sns.relplot(
        shown.assign(panel=panels),
        x=x,
        y="value",
        hue=" ",
        col="panel",
        kind="line",
        marker="o",
        linestyle="-" if numeric else "",
        estimator=None,
        palette="colorblind",
        height=COLUMN_IN,
    )
    axes.set_axis_labels(x.removeprefix("grid_"), numbers["quantity"].iloc[0].replace(", ", ",\n"))
    axes.set_titles("{col_name}")
    if numeric:
        axes.set(xticks=sorted(numbers[x].unique()))
    if numbers["value"].min() > 0 and numbers["value"].max() > LINEAR * numbers["value"].min():
        axes.set(yscale="log")
    return axes.figure


def _draw(grid: ParameterGrid, numbers: pd.DataFrame, folder: Path) -> list[tuple[str, str]]:
    """Save a figure a notebook as SVG and PNG; the notebooks' ids, and their PNGs as data URIs."""
    pictures = []
    for id, part in numbers.dropna(subset="value").groupby("notebook", sort=False):
        drawn, stem = figure(grid, part), make_folder(folder) / str(id).replace("/", "-")
        save_figure(drawn, stem)
        plt.close(drawn)
        pictures.append((str(id), png_uri(stem.with_name(f"{stem.name}.png"))))
    return pictures


def _page(job: Job, folder: Path, rebuild: bool) -> str | None:
    """Publish a job's page; its name, and None where it has none."""
    last = driver.outcome(job.id, job.is_fresh())
    executed = last.failed_notebook or job.folder / "notebook.ipynb"
    return publish_page(job.about(), executed, folder, rebuild, last.error if last.failed else None)


def _parameters(grid: ParameterGrid, job: Job) -> dict[str, object]:
    values = grid.points[job.point]
    return {
        f"grid_{name}": str(values[name]) if isinstance(values[name], list) else values[name] for name in grid.values
    }

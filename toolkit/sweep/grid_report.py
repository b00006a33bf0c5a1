"""What a grid leaves beside its points: `points.csv`, `tables/`, a figure, and a page with links to every notebook.

Columns that begin with `grid_` are the grid's parameters.
"""

import re
from pathlib import Path

import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from toolkit import paths
from toolkit.evidence.cards import Card
from toolkit.evidence.figures import COLUMN_IN, use_style
from toolkit.evidence.meta import read_meta
from toolkit.evidence.page import png_uri, render
from toolkit.evidence.report import publish_page
from toolkit.evidence.tables import combined_tables
from toolkit.files import make_folder, replacing
from toolkit.sweep import driver, state
from toolkit.sweep.grid import ParameterGrid
from toolkit.sweep.plan import Job

PANEL_IN = 3.2  # height
LINEAR = 30  # largest over smallest number of a row of panels that a linear axis shows


def write_report(grid: ParameterGrid, jobs: list[Job], rebuild: bool = False, running: bool = False) -> Path:
    """Write the grid's tables, its figure and `report/`, with a page a notebook and point; return the index.

    `rebuild` converts the executed notebooks anew. While notebooks are `running`, the tables stay as they are.
    """
    results = paths.results_dir()
    folder = make_folder(results / "report")
    points = points_table(grid, jobs)
    with replacing(results / "points.csv") as path:
        points.to_csv(path, index=False)
    if not running:
        for name, table in grid_tables(grid, jobs).items():
            with replacing(make_folder(results / "tables") / f"{name}.csv") as path:
                table.to_csv(path, index=False)
    picture = _draw(grid, jobs, results / "grid")
    pages = [_page(job, folder, rebuild) for job in jobs]
    render(
        "grid.html",
        folder / "index.html",
        grid=grid.values,
        columns=[name for name in points if name not in ("error", "numbers")],
        rows=list(zip(points.to_dict("records"), pages, strict=True)),
        captions=points[["notebook", "numbers"]].dropna().drop_duplicates("notebook").to_numpy().tolist(),
        picture=picture,
        tables=sorted(file.name for file in (results / "tables").glob("*.csv")),
    )
    return folder / "index.html"


def points_table(grid: ParameterGrid, jobs: list[Job]) -> pd.DataFrame:
    """A row a notebook and point: parameters, status, seconds, error, and the few numbers that stand for the notebook.

    `numbers` says what these are, with unit and evidence. Results that are out of date give none.
    """
    rows, cards = [], read_cards(grid, jobs)
    for job in jobs:
        last, card = state.load(job.id), cards.get(job.id)
        rows.append(
            {
                "notebook": job.row,
                **_parameters(grid, job),
                "status": driver.status(job, last),
                "seconds": last and last.seconds,
                "error": last and last.error,
                "numbers": card and card.caption,
                **(card.bars if card else {}),
            }
        )
    return pd.DataFrame(rows)


def grid_tables(grid: ParameterGrid, jobs: list[Job]) -> dict[str, pd.DataFrame]:
    """Of all points together: perplexity, accuracy and latency, and each notebook's own table by its id."""
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


def figure(grid: ParameterGrid, jobs: list[Job]) -> Figure | None:
    """A row of panels a notebook, its card's numbers over the first parameter; a panel for each of the other values.

    None while no point has numbers to draw.
    """
    x, *others = grid.values
    drawn = {}  # by notebook and words of its panel
    cards = read_cards(grid, jobs)
    for job in jobs:
        if job.id in cards:
            values = grid.points[job.point]
            words = ", ".join([job.row, *(f"{name} = {values[name]}" for name in others)])
            drawn.setdefault(job.row, {}).setdefault(words, []).append((values[x], cards[job.id]))
    if not drawn:
        return None
    wide = max(map(len, drawn.values()))
    size = (COLUMN_IN * (1 + wide) / 2, PANEL_IN * len(drawn))
    made = Figure(figsize=size, layout="constrained")
    rows = made.subplots(len(drawn), wide, squeeze=False, sharey="row")
    for axes, panels in zip(rows, drawn.values(), strict=True):
        for axis, (words, points) in zip(axes, panels.items(), strict=False):
            _lines(axis, x, points, words)
        heights = [height for points in panels.values() for _, card in points for height in card.bars.values()]
        if min(heights) > 0 and max(heights) / min(heights) > LINEAR:
            axes[0].set_yscale("log")
        axes[0].set_ylabel(next(iter(panels.values()))[0][1].caption.replace(", ", ",\n"), fontsize=8)
        axes[len(panels) - 1].legend(loc="upper left", bbox_to_anchor=(1, 1))
        for empty in axes[len(panels) :]:
            empty.set_axis_off()
    return made


def _lines(axes: Axes, x: str, points: list[tuple[object, Card]], words: str) -> None:
    """A line a label; values that are no numbers stand side by side, in the order of the command line."""
    labels = list(dict.fromkeys(label for _, card in points for label in card.bars))
    numeric = all(isinstance(value, int | float) and not isinstance(value, bool) for value, _ in points)
    points = sorted(points, key=lambda point: float(point[0])) if numeric else points
    places = [value if numeric else str(value) for value, _ in points]
    for label, colour in zip(labels, sns.color_palette("colorblind", len(labels)), strict=True):
        heights = [card.bars.get(label, float("nan")) for _, card in points]
        axes.plot(places, heights, marker="o", linestyle="-" if numeric else "", color=colour, label=label)
    if numeric:
        axes.set_xticks(places)
    axes.set_xlabel(x)
    axes.set_title(words, fontsize=9)


def _draw(grid: ParameterGrid, jobs: list[Job], stem: Path) -> str | None:
    """Save the figure as SVG and PNG; the PNG as a data URI, None without a figure."""
    use_style()
    made = figure(grid, jobs)
    for suffix in (".svg", ".png"):
        if made is None:
            stem.with_suffix(suffix).unlink(missing_ok=True)
            continue
        with replacing(stem.with_suffix(suffix)) as path:
            made.savefig(path, bbox_inches="tight")
    return png_uri(stem.with_suffix(".png")) if made else None


def _page(job: Job, folder: Path, rebuild: bool) -> str | None:
    """Publish a job's page; its name, and None where it has none."""
    last = driver.outcome(job.id, job.is_fresh())
    executed = last.failed_notebook or job.folder / "notebook.ipynb"
    return publish_page(job.about(), executed, folder, rebuild, last.error if last.failed else None)


def read_cards(grid: ParameterGrid, jobs: list[Job]) -> dict[str, Card]:
    """The cards of the results there are, by job, with labels that the points of a notebook share.

    In a label that other points lack, a parameter's name stands for its value: `wanda 30%` at method=wanda and
    sparsity=0.3 is `method sparsity`.
    """
    found = {job.id: card for job in jobs if job.is_fresh() and (card := read_meta(job.folder).card)}
    points = {job.id: (job.row, grid.points[job.point]) for job in jobs}
    shared: dict[str, set[str]] = {}
    for id, card in found.items():
        shared.setdefault(points[id][0], set(card.bars)).intersection_update(card.bars)
    relabelled = {}
    for id, card in found.items():
        row, values = points[id]
        bars = {label if label in shared[row] else _general(label, values): bar for label, bar in card.bars.items()}
        relabelled[id] = Card(card.caption, bars if len(bars) == len(card.bars) else card.bars)
    return relabelled


def _general(label: str, values: dict[str, object]) -> str:
    """A label with the names of parameters in the place of their values."""
    shown = {}
    for name, value in values.items():
        words = {str(value)} | ({f"{value:.0%}", f"{100 * value:g} %"} if isinstance(value, float) else set())
        shown |= dict.fromkeys(words, name)
    pattern = re.compile("|".join(rf"(?<![\w.]){re.escape(word)}(?![\w.%])" for word in sorted(shown, reverse=True)))
    return pattern.sub(lambda match: shown[match[0]], label)


def _parameters(grid: ParameterGrid, job: Job) -> dict[str, object]:
    values = grid.points[job.point]
    return {
        f"grid_{name}": str(values[name]) if isinstance(values[name], list) else values[name] for name in grid.values
    }

"""The HTML report: an index of all systems, figures and tables, readable from `file://` offline, and their pages."""

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from toolkit import paths
from toolkit.evidence.catalogue import Notebook, explorers, notebooks
from toolkit.evidence.literature import PAPERS, Paper
from toolkit.evidence.meta import HEADLINES, Meta, read_meta
from toolkit.evidence.page import (
    file_links,
    last_image,
    main_figure,
    matching_presets,
    preset_words,
    read_book,
    render,
    write_page,
)
from toolkit.evidence.tables import comparisons, score_table, write_tables
from toolkit.files import make_folder
from toolkit.measure.disturbance import disturbance_words

BEYOND = "beyond"  # among `PAPERS`: what is asked beyond the papers


@dataclass(frozen=True)
class Outcome:
    """The state of a notebook's last run: whether its results still answer to it, and how a failed run ended.

    `failed_notebook` is the executed notebook of a failed run, where there is one.
    """

    fresh: bool = True
    error: str | None = None
    seconds: float | None = None
    failed_notebook: Path | None = None

    @property
    def failed(self) -> bool:
        """Whether the last run failed."""
        return self.failed_notebook is not None


@dataclass(frozen=True)
class Entry:
    """One figure on the index; `status` is done, out of date, failed or not run."""

    about: Notebook
    status: str
    note: str | None = None
    meta: Meta = field(default_factory=Meta)
    page: str | None = None
    picture: str | None = None
    seconds: float | None = None
    files: tuple[tuple[str, str], ...] = ()


def write_report(outcomes: Mapping[str, Outcome], rebuild: bool = False, running: bool = False) -> Path:
    """Write `results/report/`, the notebooks' pages and the index of all systems and figures; return the index.

    `outcomes` tells by id how each notebook's last run ended; one without an entry counts as fresh. `rebuild` converts
    the executed notebooks anew instead of taking the pages made when they ran. A notebook whose page or entry cannot be
    made is shown as such. While notebooks are `running`, the tables over all notebooks stay as they are: writing them
    takes six times as long as the rest.
    """
    folder = paths.results_dir() / "report"
    make_folder(folder)
    entries = [_entry(about, outcomes.get(about.id, Outcome()), folder, rebuild) for about in notebooks().values()]
    elsewhere = _grids()
    wanted = {entry.page for entry in entries} | {"index.html", *(address for _, address in elsewhere)}
    for old in folder.glob("*.html"):
        if old.name not in wanted:
            old.unlink()
    index = folder / "index.html"
    groups: dict[str, list[Entry]] = {}
    for entry in entries:
        groups.setdefault(entry.about.paper, []).append(entry)
    render(
        "index.html",
        index,
        systems=[(id, paper, _counted(groups.get(id, [])), _statements(entries, id)) for id, paper in PAPERS.items()],
        scores=_or_nothing(lambda: score_table(comparisons(paths.results_dir())).to_dict("records")),
        names={id: paper.name for id, paper in PAPERS.items()},
        groups=[(id, PAPERS.get(id, Paper("")), group) for id, group in groups.items()],
        tally=_tally(entries),
        tables=[] if running else _or_nothing(lambda: sorted(write_tables(paths.results_dir()).glob("*.csv"))),
        circumstances=_circumstances(entries),
        elsewhere=elsewhere,
        explorers=[_explorer(about) for about in explorers().values()],
    )
    return index


def _grids() -> list[tuple[str, str]]:
    """Words and address of a link to each grid."""
    pages = sorted(paths.grid_dir("").glob("*/report/index.html"))
    return [
        (f"Grid: {page.parts[-3].replace('+', ', ')}", f"../grid/{page.parts[-3]}/report/index.html") for page in pages
    ]


def _explorer(about: Notebook) -> tuple[Notebook, str | None, str | None]:
    """An explorer, its still picture and the address of the notebook with it, as far as it was drawn."""
    executed = paths.results_dir() / about.id / "notebook.ipynb"
    return about, last_image(read_book(executed)), f"../{about.id}/{executed.name}" if executed.is_file() else None


def _entry(about: Notebook, outcome: Outcome, folder: Path, rebuild: bool) -> Entry:
    try:
        return _read_entry(about, outcome, folder, rebuild)
    except Exception as error:  # one notebook's results, whatever they are, never cost the report of all others
        return Entry(about, "failed", f"it cannot be shown: {type(error).__name__}: {error}")


def _read_entry(about: Notebook, outcome: Outcome, folder: Path, rebuild: bool) -> Entry:
    results = paths.results_dir() / about.id
    meta = read_meta(results)
    executed = outcome.failed_notebook or results / "notebook.ipynb"
    status, note = ("failed", outcome.error) if outcome.failed else _status(about, results, meta, outcome)
    return Entry(
        about,
        status,
        note,
        meta,
        publish_page(about, executed, folder, rebuild, outcome.error if outcome.failed else None),
        None if meta.card else main_figure(results, meta),
        meta.wall_s if outcome.seconds is None else outcome.seconds,
        file_links(results, about),
    )


def _status(about: Notebook, results: Path, meta: Meta, outcome: Outcome) -> tuple[str, str | None]:
    if not any(results.glob("*")):  # a stopped sweep leaves it empty
        return "not run", None
    if meta.id != about.id:
        return "not run", "its results folder has no meta.json of this notebook: run it again"
    if meta.schema != paths.RESULTS_SCHEMA:
        return "out of date", f"its results are of schema {meta.schema}, this is {paths.RESULTS_SCHEMA}: run it again"
    return ("done" if outcome.fresh else "out of date"), None


def publish_page(about: Notebook, executed: Path, folder: Path, rebuild: bool, error: str | None) -> str | None:
    """Copy a notebook's page into the report; its name there, or None for one that has not run."""
    source = executed.with_suffix(".html") if executed.name != "notebook.ipynb" else executed.with_name("page.html")
    page = folder / (about.id.replace("/", "-") + ".html")
    if executed.is_file() and (rebuild or not source.is_file()):
        write_page(executed, page, about, error)
    elif source.is_file():
        shutil.copyfile(source, page)
    else:
        return None
    return page.name


def _counted(entries: Sequence[Entry]) -> tuple[int, int]:
    """How many notebooks have results, of how many."""
    return sum(entry.status in ("done", "out of date") for entry in entries), len(entries)


def _statements(entries: Sequence[Entry], system: str) -> dict[str, list[Entry]]:
    """The notebooks with a sentence on a system, by its kind: gain, cost, negative; none without any."""
    ours = [
        entry
        for entry in entries
        if system == entry.meta.headline.get("system", entry.about.paper) or system == entry.about.paper == BEYOND
    ]
    by_kind = {kind: [entry for entry in ours if kind in entry.meta.headline] for kind in HEADLINES}
    return {kind: found for kind, found in by_kind.items() if found}


def _or_nothing(made: Callable[[], list]) -> list:
    """A part of the index; nothing if it cannot be made, since results of an older version must not cost the report."""
    try:
        return made()
    except Exception:
        return []


def _circumstances(entries: Sequence[Entry]) -> list[tuple[str, str]]:
    """Machine, dates, commit and preset of the results that the report is made of."""
    with_results = [entry for entry in entries if entry.meta.finished]
    metas = [entry.meta for entry in with_results]
    if not metas:
        return []
    days = sorted({meta.finished[:10] for meta in metas})
    count, known = (sum(meta.disturbed[key] for meta in metas) for key in ("rows", "of"))
    presets = set.intersection(*(matching_presets(entry.about, entry.meta) for entry in with_results))
    return [
        ("Machine", "; ".join(dict.fromkeys(meta.machine or "unknown" for meta in metas))),
        ("Date", days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"),
        ("Commit", "; ".join(dict.fromkeys(meta.commit or "unknown" for meta in metas))),
        ("Parameters", preset_words(presets) if presets else "not of one preset; each page shows its own"),
        *([("Load", f"{disturbance_words(count, known)}.")] if known else []),
    ]


def _tally(entries: Sequence[Entry]) -> str:
    statuses = [entry.status for entry in entries]
    counts = ", ".join(f"{statuses.count(status)} {status}" for status in dict.fromkeys(statuses))
    return f"{len(entries)} figures and tables: {counts}."

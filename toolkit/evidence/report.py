"""The HTML report: six findings, all figures and tables as cards, and their pages, readable from `file://` offline.

The folder of a report has copies of all files that its pages link: it can be moved, packed and mailed.
"""

import shutil
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from zipfile import ZIP_DEFLATED, ZipFile

from toolkit import paths
from toolkit.evidence.catalogue import Notebook, explorers, notebooks, parameter_words
from toolkit.evidence.findings import BEYOND, conclusion, findings, models_of, priced, real_model
from toolkit.evidence.literature import PAPERS, Paper
from toolkit.evidence.meta import HEADLINES, Meta, read_meta
from toolkit.evidence.page import (
    FILES,
    last_image,
    main_figure,
    matching_presets,
    preset_words,
    read_book,
    render,
    write_page,
)
from toolkit.evidence.tables import comparisons, score_table, write_tables
from toolkit.files import make_folder, replacing
from toolkit.measure.disturbance import disturbance_words


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
    base: "Entry | None" = None


@dataclass(frozen=True)
class Variant:
    """Results with parameters that the user `changed`; those in the folder `base` are drawn over them."""

    changed: Mapping[str, object]
    base: Path


def write_report(
    outcomes: Mapping[str, Outcome], rebuild: bool = False, running: bool = False, variant: Variant | None = None
) -> Path:
    """Write `results/report/`, the notebooks' pages and the index of all systems and figures; return the index.

    `outcomes` tells by id how each notebook's last run ended; one without an entry counts as fresh. `rebuild` converts
    the executed notebooks anew instead of taking the pages made when they ran. A notebook whose page or entry cannot be
    made is shown as such. While notebooks are `running`, the tables over all notebooks stay as they are: writing them
    takes six times as long as the rest. The report of a `variant` has the notebooks with these parameters: the
    base's numbers lie over their bars, or its figure beside theirs. It has neither findings nor scores, which are of
    the base.
    """
    folder = paths.results_dir() / "report"
    make_folder(folder)
    changed = variant.changed.keys() if variant else set()
    books = [about for about in notebooks().values() if changed <= about.parameters.keys()]
    entries = [_entry(about, outcomes.get(about.id, Outcome()), folder, rebuild) for about in books]
    if variant:
        entries = [replace(entry, base=_base(entry.about, variant.base)) for entry in entries]
    wanted = {entry.page for entry in entries} | {"index.html"}
    for old in folder.glob("*.html"):
        if old.name not in wanted:
            old.unlink()
    index = folder / "index.html"
    groups: dict[str, list[Entry]] = {}
    for entry in entries:
        if not _is_missing(entry):
            groups.setdefault(entry.about.paper, []).append(entry)
    by_id = {entry.about.id: entry for entry in entries}
    found = [] if variant else _or_nothing(lambda: findings(by_id))
    statements = partial(_statements, entries, with_price=priced(found))
    every = {} if variant else explorers()
    drawn = {about.id: about for about in every.values() if carry([_executed(about)], folder / about.id)}
    undrawn = [(about, "an explorer, not drawn yet") for id, about in every.items() if id not in drawn]
    render(
        "index.html",
        index,
        changed=parameter_words(variant.changed) if variant else None,
        drawn_over=_drawn_over,
        findings=found,
        conclusion=conclusion(found),
        real_model=[] if variant else _or_nothing(lambda: real_model(by_id)),
        scores=[] if variant else _or_nothing(lambda: score_table(comparisons(paths.results_dir())).to_dict("records")),
        names={id: paper.name for id, paper in PAPERS.items()},
        groups=[(id, PAPERS.get(id, Paper("")), statements(id), group) for id, group in groups.items()],
        not_run=[(entry.about, entry.note) for entry in entries if _is_missing(entry)],
        undrawn=undrawn,
        tally=_tally(entries),
        tables=[] if running else _or_nothing(lambda: _tables(folder)),
        circumstances=_circumstances(entries),
        elsewhere=[] if running else _elsewhere(folder),
        explorers=[
            (about, last_image(read_book(_executed(about))), f"{id}/{_executed(about).name}")
            for id, about in drawn.items()
        ],
    )
    return index


def pack(report: Path) -> Path:
    """Pack the folder of a report as a zip beside it; return the zip. Raises `UserError` for trouble with the disk.

    Links are left out: the report has none of its own, and one could lead to any file of this machine.
    """
    target = report.with_suffix(".zip")
    with replacing(target) as made, ZipFile(made, "w", ZIP_DEFLATED, strict_timestamps=False) as archive:
        for file in sorted(report.rglob("*")):
            if not file.is_symlink() and file.is_file():
                archive.write(file, Path(report.name, file.relative_to(report)))
    return target


def carry(files: Iterable[Path], folder: Path) -> list[Path]:
    """Copy the files that exist into a folder of the report, unless they are unchanged; return the copies."""
    present = [(file, folder / file.name) for file in files if file.is_file()]
    for file, target in present:
        if not target.is_file() or target.stat().st_mtime_ns != file.stat().st_mtime_ns:
            shutil.copy2(file, make_folder(folder) / file.name)
    return [target for _, target in present]


def _is_missing(entry: Entry) -> bool:
    return entry.status == "not run"


def _tables(folder: Path) -> list[Path]:
    """The tables over all notebooks, as seen from the report."""
    made = sorted(write_tables(paths.results_dir()).glob("*.csv"))
    return [file.relative_to(folder) for file in carry(made, folder / "tables")]


def _elsewhere(folder: Path) -> list[tuple[str, str]]:
    """Words and address of the reports on models, variants and grids, which are copied into this one."""
    found = []
    for kind, place in {"Model": paths.model_results_dir, "Variant": paths.variant_dir, "Grid": paths.grid_dir}.items():
        several = place("x").parent
        shutil.rmtree(folder / several.name, ignore_errors=True)
        for page in sorted(several.glob("*/report/index.html")):
            name = page.parts[-3]
            shutil.copytree(page.parent, folder / several.name / name, symlinks=True)
            found.append((f"{kind}: {name.replace('+', ', ')}", f"{several.name}/{name}/index.html"))
    return found


def _base(about: Notebook, results: Path) -> Entry | None:
    """The base's numbers or figure of a notebook; None where it has none."""
    meta = read_meta(results / about.id)
    picture = None if meta.card else main_figure(results / about.id, meta)
    return Entry(about, "base", preset_words(matching_presets(about, meta)), meta, None, picture) if meta.id else None


def _drawn_over(entry: Entry) -> dict[str, float]:
    """The base's numbers that lie over an entry's bars, by label; none where the two show different quantities."""
    card, base = entry.meta.card, entry.base.meta.card if entry.base else None
    if not card or not base or card["caption"] != base["caption"]:
        return {}
    return {label: base["bars"][label] for label in card["bars"] if label in base["bars"]}


def _executed(about: Notebook) -> Path:
    return paths.results_dir() / about.id / "notebook.ipynb"


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
    """Copy a notebook's page and the files that it links; the page's name, or None for one that has not run."""
    source = executed.with_suffix(".html") if executed.name != "notebook.ipynb" else executed.with_name("page.html")
    page = folder / (about.id.replace("/", "-") + ".html")
    if executed.is_file() and (rebuild or not source.is_file()):
        write_page(executed, page, about, error)
    elif source.is_file():
        shutil.copyfile(source, page)
    else:
        shutil.rmtree(folder / about.id, ignore_errors=True)
        return None
    carry((paths.results_dir() / about.id / name for name in FILES.values()), folder / about.id)
    return page.name


def _statements(entries: Sequence[Entry], system: str, with_price: Collection[str]) -> dict[str, list[Entry]]:
    """The notebooks with a sentence on a system, by its kind: gain, cost, negative; none without any.

    Papers whose price stands on top have no cost here: a page has one price of each.
    """
    ours = [
        entry
        for entry in entries
        if system == entry.meta.headline.get("system", entry.about.paper) or system == entry.about.paper == BEYOND
    ]
    kinds = [kind for kind in HEADLINES if kind != "cost" or system not in with_price]
    by_kind = {kind: [entry for entry in ours if kind in entry.meta.headline] for kind in kinds}
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
    models = models_of(meta.parameters for meta in metas)
    return [
        *([("Model", models)] if models else []),
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

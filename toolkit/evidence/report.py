"""The HTML report: one self-contained page per notebook and an index of them, readable from `file://` offline."""

import base64
import itertools
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import jinja2

from toolkit import paths
from toolkit.evidence.catalogue import Notebook, rows
from toolkit.evidence.claims import MET, NOT_RUN, SHAPE
from toolkit.files import read_json, replacing

TEMPLATES = Path(__file__).with_name("templates")
NEAR = (MET, SHAPE)
PAPERS = {
    "endor": "ENDOR",
    "flash": "LLM in a flash",
    "spqr": "SpQR's inference kernel",
    "hermes": "Hermes",
    "corm": "CORM",
    "beyond": "Beyond the papers",
}
MATHS = re.compile(r"\$\$(?P<block>[^$]+)\$\$|(?<![\\$\w])\$(?P<inline>[^$\s](?:[^$\n]*[^$\s])?)\$(?![\w$])")


@dataclass(frozen=True)
class Outcome:
    """What is known of a notebook's last run: whether its results still answer to it, and how a failed run ended.

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
class Card:
    """One figure on the index page; `status` is done, out of date, failed, not run or not yet."""

    id: str
    paper: str
    title: str
    question: str
    status: str
    page: str | None = None
    thumbnail: str | None = None
    note: str | None = None
    verdicts: dict[str, int] = field(default_factory=dict)
    evidence: tuple[str, ...] = ()
    seconds: float | None = None


def write_page(notebook: Path, page: Path, title: str) -> None:
    """Write an executed notebook as one HTML file: figures embedded, maths as MathML, no script, nothing fetched."""
    import nbformat
    from nbconvert import HTMLExporter
    from pygments.formatters import HtmlFormatter

    book = nbformat.read(notebook, as_version=4)
    for cell in book.cells:
        if cell.cell_type == "markdown":
            cell.source = MATHS.sub(_mathml, cell.source)
    body, _ = HTMLExporter(template_name="basic").from_notebook_node(book)
    highlighting = HtmlFormatter(style="default").get_style_defs(".highlight")
    _render("page.html", page, title=title, body=body, highlighting=highlighting)


def write_report(outcomes: Mapping[str, Outcome], rebuild: bool = False) -> Path:
    """Write `results/report/`, the notebooks' pages and the index of all figures; return the index.

    `outcomes` tells by id how each notebook's last run ended; one without an entry counts as fresh. `rebuild` converts
    the executed notebooks anew instead of taking the pages made when they ran.
    """
    folder = paths.results_dir() / "report"
    folder.mkdir(parents=True, exist_ok=True)
    cards = [_card(notebook, outcomes.get(notebook.id, Outcome()), folder, rebuild) for notebook in rows().values()]
    wanted = {card.page for card in cards} | {"index.html"}
    for old in folder.glob("*.html"):
        if old.name not in wanted:
            old.unlink()
    index = folder / "index.html"
    groups = [(PAPERS.get(paper), list(group)) for paper, group in itertools.groupby(cards, lambda card: card.paper)]
    _render("index.html", index, groups=groups, tally=_tally(cards), near=NEAR)
    return index


def claims_met(folder: Path) -> str:
    """How many of the paper's numbers a notebook's own came near: '3 of 4', or '–' if it compares none."""
    verdicts = read_json(folder / "meta.json").get("verdicts") or {}
    compared = sum(count for verdict, count in verdicts.items() if verdict != NOT_RUN)
    return f"{sum(verdicts.get(verdict, 0) for verdict in NEAR)} of {compared}" if compared else "–"


def _card(notebook: Notebook, outcome: Outcome, folder: Path, rebuild: bool) -> Card:
    results = paths.results_dir() / notebook.id
    meta = read_json(results / "meta.json")
    executed = outcome.failed_notebook or results / "notebook.ipynb"
    status, note = ("failed", outcome.error) if outcome.failed else _status(notebook, results, meta, outcome)
    return Card(
        notebook.id,
        notebook.paper,
        notebook.title,
        notebook.question,
        status,
        _publish_page(notebook, executed, folder, rebuild),
        _thumbnail(results, meta),
        note,
        meta.get("verdicts") or {},
        tuple(meta.get("evidence") or ()),
        meta.get("wall_s") if outcome.seconds is None else outcome.seconds,
    )


def _status(notebook: Notebook, results: Path, meta: dict, outcome: Outcome) -> tuple[str, str | None]:
    if not notebook.path.is_file():
        return "not yet", None
    if not results.exists():
        return "not run", None
    if meta.get("id") != notebook.id:
        return "not run", "its results folder has no meta.json of this notebook: run it again"
    if meta.get("schema") != paths.RESULTS_SCHEMA:
        return (
            "out of date",
            f"its results are of schema {meta.get('schema')}, this is {paths.RESULTS_SCHEMA}: run it again",
        )
    absent = [f"{name}.png" for name in meta.get("figures", []) if not (results / f"{name}.png").is_file()]
    if absent:
        return "out of date", f"{', '.join(absent)} is missing: run it again"
    return ("done" if outcome.fresh else "out of date"), None


def _publish_page(notebook: Notebook, executed: Path, folder: Path, rebuild: bool) -> str | None:
    """Copy the notebook's page into the report; its name there."""
    source = executed.with_suffix(".html") if executed.name != "notebook.ipynb" else executed.with_name("page.html")
    if rebuild and executed.is_file():
        write_page(executed, source, notebook.title)
    if not source.is_file():
        return None
    page = notebook.id.replace("/", "-") + ".html"
    with replacing(folder / page) as copy:
        shutil.copyfile(source, copy)
    return page


def _thumbnail(results: Path, meta: dict) -> str | None:
    """The first figure as a data URI, so that the index needs no file beside it."""
    present = [file for name in meta.get("figures", []) if (file := results / f"{name}.png").is_file()]
    return f"data:image/png;base64,{base64.b64encode(present[0].read_bytes()).decode()}" if present else None


def _tally(cards: Sequence[Card]) -> str:
    verdicts = [verdict for card in cards for verdict, count in card.verdicts.items() for _ in range(count)]
    statuses = [card.status for card in cards]
    counts = ", ".join(f"{statuses.count(status)} {status}" for status in dict.fromkeys(statuses))
    met, run = sum(verdict in NEAR for verdict in verdicts), sum(verdict != NOT_RUN for verdict in verdicts)
    compared = f" {met} of the {run} published numbers compared here are met." if run else ""
    return f"{len(cards)} figures and tables: {counts}.{compared}"


def _mathml(match: re.Match) -> str:
    from latex2mathml.converter import convert

    block = match["block"]
    return convert((block or match["inline"]).strip(), display="block" if block else "inline")


def _render(template: str, target: Path, **values: object) -> None:
    environment = jinja2.Environment(loader=jinja2.FileSystemLoader(TEMPLATES), autoescape=True, trim_blocks=True)
    text = environment.get_template(template).render(**values)
    with replacing(target) as temporary:
        temporary.write_text(text, encoding="utf-8")

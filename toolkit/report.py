"""The HTML report: one self-contained page per notebook and an index of them, readable from `file://` offline."""

import base64
import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import jinja2

from toolkit import paths
from toolkit.sweep import state
from toolkit.sweep.plan import Job, read_json

if TYPE_CHECKING:
    from collections.abc import Mapping

TEMPLATES = Path(__file__).with_name("templates")


@dataclass(frozen=True)
class Card:
    """One notebook on the index page."""

    id: str
    title: str
    question: str
    status: str
    page: str | None = None
    thumbnail: str | None = None
    error: str | None = None
    meta: "Mapping[str, object] | None" = None
    claims: str = "–"
    seconds: float | None = None


def write_page(notebook: Path, page: Path, title: str) -> None:
    """Write an executed notebook as one HTML file: figures embedded, no script, nothing fetched from elsewhere."""
    import nbformat
    from nbconvert import HTMLExporter
    from pygments.formatters import HtmlFormatter

    body, _ = HTMLExporter(template_name="basic").from_notebook_node(nbformat.read(notebook, as_version=4))
    highlighting = HtmlFormatter(style="default").get_style_defs(".highlight")
    _render("page.html", page, title=title, body=body, highlighting=highlighting)


def write_report(jobs: Sequence[Job], rebuild: bool = False) -> Path:
    """Write `results/report/`: the pages of all notebooks that have results, and the index. Returns the index.

    `rebuild` converts the executed notebooks anew instead of taking the pages made when they ran.
    """
    from toolkit.sweep.catalogue import notebooks

    folder = paths.results_dir() / "report"
    folder.mkdir(parents=True, exist_ok=True)
    keys = {job.id: job for job in jobs}
    cards = [_card(notebook, keys.get(notebook.id), folder, rebuild) for notebook in notebooks().values()]
    wanted = {card.page for card in cards} | {"index.html"}
    for old in folder.glob("*.html"):
        if old.name not in wanted:
            old.unlink()
    index = folder / "index.html"
    _render("index.html", index, cards=cards)
    return index


def claims_met(folder: Path) -> str:
    """How many of the paper's numbers a notebook's own came near: '3 of 4', or '–' if it compares none."""
    verdicts = read_json(folder / "meta.json").get("verdicts") or {}
    compared = sum(count for verdict, count in verdicts.items() if verdict != "not run")
    met = verdicts.get("within tolerance", 0) + verdicts.get("same shape", 0)
    return f"{met} of {compared}" if compared else "–"


def _card(notebook, job: Job | None, folder: Path, rebuild: bool) -> Card:
    results = paths.results_dir() / notebook.id
    meta = read_json(results / "meta.json")
    last = state.load(notebook.id)
    failed = last is not None and last.status == "failed"
    source = state.failed_page(notebook.id).with_suffix(".html") if failed else results / "page.html"
    executed = state.failed_page(notebook.id) if failed else results / "notebook.ipynb"
    if rebuild and executed.is_file():
        write_page(executed, source, notebook.title)
    page = None
    if source.is_file():
        page = notebook.id.replace("/", "-") + ".html"
        shutil.copyfile(source, folder / f".{page}")
        (folder / f".{page}").replace(folder / page)
    if failed:
        status = "failed"
    elif not meta:
        status = "not run"
    else:
        status = "done" if job is None or job.is_fresh() else "out of date"
    return Card(
        notebook.id,
        notebook.title,
        notebook.question,
        status,
        page,
        _thumbnail(results, meta),
        last.error if failed else None,
        meta or None,
        claims_met(results),
        last.seconds if last else meta.get("wall_s"),
    )


def _thumbnail(results: Path, meta: dict) -> str | None:
    """The first figure as a data URI, so that the index needs no file beside it."""
    figures = [results / f"{name}.png" for name in meta.get("figures", [])]
    present = [figure for figure in figures if figure.is_file()]
    return f"data:image/png;base64,{base64.b64encode(present[0].read_bytes()).decode()}" if present else None


def _render(template: str, target: Path, **values: object) -> None:
    environment = jinja2.Environment(loader=jinja2.FileSystemLoader(TEMPLATES), autoescape=True, trim_blocks=True)
    environment.filters["json"] = lambda value: json.dumps(value, ensure_ascii=False)
    text = environment.get_template(template).render(**values)
    temporary = target.with_name(f".{target.name}.part")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(target)

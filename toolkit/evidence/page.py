"""One notebook's page of the report: question, answer and main figure first, then all cells with their code folded.

A page is one HTML file: figures embedded, maths as MathML, nothing fetched. Its one line of script has Escape close an
enlarged figure. The main figure stands on top, and not again where its cell has shown it.
"""

import base64
import csv
import json
import math
import re
from pathlib import Path

from toolkit.errors import UserError
from toolkit.evidence.catalogue import INJECTED, PARAMETERS, PRESETS, Notebook, cells_of, heading
from toolkit.evidence.claims import KINDS
from toolkit.evidence.columns import Column, column
from toolkit.evidence.comparison import GROUPS
from toolkit.evidence.literature import PAPERS
from toolkit.evidence.meta import Meta, read_meta
from toolkit.evidence.verdicts import VERDICTS
from toolkit.extras import extra
from toolkit.files import read_json, replacing
from toolkit.measure.disturbance import disturbance_words

NOTHING = "–"
PNG = "data:image/png;base64,"
SHARPER = 2  # pixels of a saved figure to one of the shown figure: `savefig.dpi` over `figure.dpi` in `use_style`
ALIKE = 150  # of its pixels, by which the two may differ: a note may have been written above the saved one
REPRODUCED, KEPT = "**Reproduced: ", "**Reproduced, by the kept results: "  # whatever this run shows
ABOVE = '<p class="small muted">The figure stands on top of this page.</p>'
OBJECT = re.compile(r"<[\w.]+[^>]* at 0x[0-9a-f]+>|\bText\(-?[\d.]+, ")  # Python's words for an artist of matplotlib
WIDGET = "application/vnd.jupyter.widget-view+json"  # needs a kernel, and scripts from elsewhere
TEMPLATES = Path(__file__).with_name("templates")
MATHS = re.compile(r"\$\$(?P<block>[^$]+)\$\$|(?<![\\$\w])\$(?P<inline>[^$\s](?:[^$\n]*[^$\s])?)\$(?![\w$])")
IMAGE = re.compile(r'<img\s[^>]*src="data:image/png[^>]*>')
ENLARGED = r'<label class="enlarge" title="enlarge"><input type="checkbox">\g<0></label>'
FILES = {
    "CSV": "table.csv",
    "beside the paper": "comparison.csv",
    "notebook": "notebook.ipynb",
    "provenance": "meta.json",
}
BAR = re.compile(r"\r(?:[^\r\n]*?\[\d+:\d\d[^\]\r\n]*\])? *")  # what tqdm writes, up to its clock, and what clears it


def write_page(executed: Path, page: Path, about: Notebook, error: str | None = None) -> None:
    """Write an executed notebook as a page.

    `about` is the notebook; `meta.json` and figures are taken from beside `executed`. `error` says how a
    failed run ended. Cells that cannot be shown do not raise: the page says so in their place.
    """
    meta, book = read_meta(executed.parent), read_book(executed)
    book["cells"] = cells_of(book["cells"], about.figure)
    figure = main_figure(executed.parent, meta) or last_image(book)
    try:
        body, problem = _cells(book, figure), None
    except Exception as raised:  # whatever a notebook holds, the sweep and its report go on
        body, problem = "", f"{type(raised).__name__}: {raised}"
    render(
        "page.html",
        page,
        title=about.title + (" (failed)" if error else ""),
        question=about.question,
        links=file_links(executed.parent, about),
        figure=figure,
        error=error,
        problem=problem,
        meta=meta,
        parameters=_parameters(about, book),
        preset=preset_words(matching_presets(about, meta)),
        reference=PAPERS[about.paper].reference if about.paper in PAPERS else None,
        columns=_columns(executed.with_name("table.csv"), about.id),
        body=body,
    )


def read_book(executed: Path) -> dict:
    """An executed notebook's JSON; one without cells if it cannot be read."""
    return {"cells": []} | read_json(executed)


def file_links(folder: Path, about: Notebook) -> tuple[tuple[str, str], ...]:
    """Words and address, as seen from the report, of the files in a folder of results."""
    return tuple((words, f"{about.id}/{name}") for words, name in FILES.items() if (folder / name).is_file())


def main_figure(folder: Path, meta: Meta) -> str | None:
    """The first saved figure that is there, as a data URI, so that the page needs no file beside it."""
    present = [file for name in meta.figures if (file := folder / f"{name}.png").is_file()]
    return png_uri(present[0]) if present else None


def png_uri(file: Path) -> str:
    """A PNG as a data URI."""
    return f"{PNG}{base64.b64encode(file.read_bytes()).decode()}"


def _parameters(about: Notebook, book: dict) -> list[tuple[str, str, str | None]]:
    """Name and value, as JSON, of a run's parameters; then the default, where the run took another value."""
    try:
        defaults = about.parameters
    except UserError:  # the notebook has changed since
        defaults = {}
    given = book.get("metadata", {}).get("papermill", {}).get("parameters", {})
    return [
        (name, _json(value), _json(defaults[name]) if defaults.get(name, value) != value else None)
        for name, value in (defaults | given).items()
    ]


def _columns(table: Path, id: str) -> dict[str, Column]:
    """Unit and meaning of the columns of a table, as far as the dictionary has them."""
    if not table.is_file():
        return {}
    with table.open(encoding="utf-8", newline="") as file:
        names = next(csv.reader(file), [])
    return {name: known for name in names if (known := column(name, id))}


def matching_presets(about: Notebook, meta: Meta) -> set[str]:
    """The presets that give the parameters of these results; none if some were set by hand."""
    try:
        return {name for name in PRESETS if meta.parameters and about.preset(name) == meta.parameters}
    except UserError:
        return set()


def preset_words(presets: set[str]) -> str:
    """Presets as words of a footer."""
    if not presets:
        return "parameters of its own"
    named = [name for name in PRESETS if name in presets]
    return "preset " + " or ".join(named) if len(named) < len(PRESETS) else "the same in every preset"


def render(template: str, target: Path, **values: object) -> None:
    """Write one of the report's templates to a file."""
    with extra("lab"):
        import jinja2

    environment = jinja2.Environment(loader=jinja2.FileSystemLoader(TEMPLATES), autoescape=True, trim_blocks=True)
    environment.globals |= {"highlighting": _highlighting, "disturbed": disturbance_words}
    environment.globals |= {"VERDICTS": VERDICTS, "KINDS": KINDS, "GROUPS": GROUPS}
    environment.filters |= {"digits": three_digits, "cell": cell}
    text = environment.get_template(template).render(**values)
    with replacing(target) as temporary:
        temporary.write_text(text, encoding="utf-8", errors="replace")


def three_digits(number: float) -> str:
    """A number to read: 0.0123, 1.23, 1,234, 12,300, 82,600,000, 1.86e+14, 1.23e-07; – for none."""
    if math.isnan(number):
        return NOTHING
    if 100 <= abs(number) < 10_000:
        return f"{number:,.0f}"
    return f"{float(f'{number:.3g}'):,.0f}" if 100 <= abs(number) < 1e9 else f"{number:.3g}"


def cell(value: object) -> str:
    """A value for a table: a number that is not whole with three digits, nothing as a dash."""
    if value is None or value != value:
        return NOTHING
    return three_digits(value) if isinstance(value, float) else str(value)


def _cells(book: dict, figure: str | None) -> str:
    """All cells but the parameters', which the header shows as it does the `figure`; code folded."""
    with extra("lab"):
        import nbformat
        from nbconvert import HTMLExporter

    if not book["cells"]:
        raise UserError("there is no notebook, or it has no cells")
    notebook = nbformat.reads(json.dumps(book), as_version=4)
    notebook.cells = [
        cell for cell in notebook.cells if not {PARAMETERS, INJECTED} & set(cell.metadata.get("tags", ()))
    ]
    if notebook.cells and notebook.cells[0].cell_type == "markdown":
        *_, rest = heading(notebook.cells[0].source)  # the page's header has title and question
        notebook.cells[0].source = rest.replace(REPRODUCED, KEPT)
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            cell.source = MATHS.sub(_mathml, cell.source)
        cell.outputs = _joined(_to_read(cell.get("outputs", [])))
    if figure:
        _leave_out(figure, [output for cell in notebook.cells for output in cell.outputs])
    exporter = HTMLExporter(template_name="notebook", extra_template_basedirs=[str(TEMPLATES)])
    return IMAGE.sub(ENLARGED, exporter.from_notebook_node(notebook)[0])


def _to_read(outputs: list) -> list:
    """A cell's outputs without progress bars, as widgets or on stderr, where updates may be outputs, and objects."""
    for output in outputs:
        if output.get("name") == "stderr":
            output.text = BAR.sub("", output.text)
    return [
        output
        for output in outputs
        if WIDGET not in output.get("data", {})
        and (output.get("name") != "stderr" or output.text.strip())
        and not (set(output.get("data", {})) == {"text/plain"} and OBJECT.search(output.data["text/plain"]))
    ]


def _joined(outputs: list) -> list:
    """Text that came in several pieces as one, as the Lab shows it: each output is a paragraph of the page."""
    joined: list = []
    for output in outputs:
        if output.output_type == "stream" and joined and joined[-1].get("name") == output.name:
            joined[-1].text += output.text
        else:
            joined.append(output)
    return joined


def _leave_out(figure: str, outputs: list) -> None:
    """Put words in the place of the output that shows a figure: the nearest to it in size, within `ALIKE`."""
    width, height = _size(figure.removeprefix(PNG))
    off = {}
    for place, output in enumerate(outputs):
        if image := output.get("data", {}).get("image/png"):
            shown = _size(image)
            off[place] = min(abs(scale * shown[0] - width) + abs(scale * shown[1] - height) for scale in (1, SHARPER))
    if off and min(off.values()) <= ALIKE:
        nearest = outputs[min(off, key=off.__getitem__)]
        nearest.data = {"text/html": ABOVE}


def _size(image: str) -> tuple[int, int]:
    """Width and height of a PNG in base64."""
    start = base64.b64decode("".join(image.split())[:32])
    return int.from_bytes(start[16:20]), int.from_bytes(start[20:24])


def _mathml(match: re.Match) -> str:
    """A formula as MathML; one that cannot be converted as it was written."""
    with extra("lab"):
        from latex2mathml.converter import convert

    block = match["block"]
    try:
        return convert((block or match["inline"]).strip(), display="block" if block else "inline")
    except Exception:  # its parser raises whatever comes up
        return f"`{match[0]}`"


def last_image(book: dict) -> str | None:
    """The last figure that the notebook shows, for want of a saved one."""
    outputs = [output.get("data", {}) for cell in book["cells"] for output in cell.get("outputs", [])]
    images = ["".join(data["image/png"]) for data in outputs if "image/png" in data]  # a string, or its lines
    return f"{PNG}{''.join(images[-1].split())}" if images else None


def _json(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _highlighting(style: str) -> str:
    from pygments.formatters import HtmlFormatter

    return HtmlFormatter(style=style).get_style_defs(".highlight")

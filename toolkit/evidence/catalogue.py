"""The notebooks there are: one row of `data/catalogue.yaml` each, with the presets of `notebooks/presets.yaml`."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from toolkit import paths, sources
from toolkit.errors import UserError, unknown
from toolkit.evidence.literature import PAPERS
from toolkit.evidence.parameters import read_cells, read_parameters
from toolkit.records import check, load_yaml

PRESETS = ("quick", "standard", "paper")
CATALOGUE = "data/catalogue.yaml"
EXPLORE = "explore"  # the folder of explorers, and the part of their ids before the slash
REQUIRED = ("id", "title", "question")
FIELDS = ("paper", *REQUIRED, "slug", "file")
ID = re.compile("[a-z0-9_]+")
NAMES = {"slug": re.compile("[A-Za-z0-9_-]+"), "file": re.compile(r"([A-Za-z0-9_-]+/)*[A-Za-z0-9_-]+\.ipynb")}
SETTINGS = {
    "type": "object",
    "additionalProperties": {
        "type": ["object", "null"],
        "properties": {"alone": {"type": "boolean"}} | {name: {"type": ["object", "null"]} for name in PRESETS},
    },
}


@dataclass(frozen=True)
class Notebook:
    """One figure or table. `id` is `<paper>/<row>`; `alone`: it times things, so it shares the machine with none.

    `interactive`: an explorer, which has controls in the place of parameters, and leaves no results.
    """

    id: str
    title: str
    question: str
    path: Path
    alone: bool = False
    presets: dict[str, dict] = field(default_factory=dict)
    interactive: bool = False

    @property
    def paper(self) -> str:
        """The paper that the figure is from; a grid puts the name of the point before it."""
        return self.id.split("/")[-2:][0]

    @cached_property
    def parameters(self) -> dict[str, object]:
        """The defaults of the `parameters` cell: preset `standard`."""
        return {} if self.interactive else read_parameters(self.path)

    @cached_property
    def code(self) -> str:
        """A digest of the notebook's cells, of every project file they import and of the data files those read."""
        cells = read_cells(self.path)
        code = "\n".join(_without_magics(cell.source) for cell in cells if cell.kind == "code")
        text = "\0".join(f"{cell.kind}\0{cell.source}" for cell in cells)
        return sources.digest(text, sources.fingerprint(sources.imports(code, paper=self.paper)))

    def preset(self, name: str) -> dict[str, object]:
        """The parameters under a preset. Raises `UserError` if it names one that the notebook does not have."""
        overrides = self.presets.get(name) or {}
        if stray := set(overrides) - set(self.parameters):
            raise UserError(f"notebooks/presets.yaml: {self.id} has no parameter {', '.join(sorted(stray))}")
        return self.parameters | overrides


def notebooks() -> dict[str, Notebook]:
    """Every row of the catalogue whose notebook is there, by id."""
    return {id: row for id, row in rows().items() if row.path.is_file()}


def explorers() -> dict[str, Notebook]:
    """The notebooks of `notebooks/explore/`, by id. They have no row: their first cell says title and question.

    Raises `UserError` for a file that is no notebook.
    """
    return {each.id: each for each in map(_explorer, sorted((paths.root() / "notebooks" / EXPLORE).glob("*.ipynb")))}


def rows() -> dict[str, Notebook]:
    """Every row of the catalogue, by id, also those that have no notebook yet.

    Raises `UserError` that names the row for a field that is missing, unknown or no text, an id that comes twice, a
    paper that `literature.PAPERS` does not have, and a notebook file of another name than the row says.
    """
    presets, listed = _presets(), load_yaml(paths.root() / CATALOGUE)
    if not isinstance(listed, list):
        raise UserError(f"{CATALOGUE} is no list; expected rows that begin with '- paper: ...' or '- id: ...'")
    found: dict[str, Notebook] = {}
    for number, row in enumerate(listed, 1):
        fault = _fault(row)
        notebook = None if fault else _notebook(row, presets)
        if notebook and notebook.id in found:
            fault = "an earlier row has this id"
        if fault := fault or _misnamed(row, notebook.path):
            raise UserError(f"{CATALOGUE}: row {number} ({_label(row)}): {fault}")
        found[notebook.id] = notebook
    if stray := set(presets) - set(found):
        raise UserError(f"notebooks/presets.yaml: {', '.join(sorted(stray))} is not in data/catalogue.yaml")
    return found


def listing(books: Mapping[str, Notebook]) -> str:
    """Notebooks, a line each: id and question."""
    return "\n".join(f"{id:27} {book.question}" for id, book in books.items())


def find(id: str) -> Notebook:
    """The notebook of that id. Raises `UserError` that lists the ids there are."""
    listed = rows()
    if id in listed and not listed[id].path.is_file():
        raise UserError(f"{CATALOGUE}: {id} has no notebook yet; expected it at {listed[id].path}")
    if id not in listed:
        raise UserError(f"{unknown('notebook', id, notebooks())}; a new one needs a row in {CATALOGUE}")
    return listed[id]


def select(names: list[str]) -> list[Notebook]:
    """The notebooks with these ids or of these papers, in the catalogue's order; all of them for no names."""
    known = notebooks()
    papers = {notebook.paper for notebook in known.values()}
    if stray := [name for name in names if name not in known and name not in papers]:
        raise unknown("notebook or paper", stray[0], papers | set(known))
    return [book for book in known.values() if not names or book.id in names or book.paper in names]


def _explorer(file: Path) -> Notebook:
    first = next((cell.source for cell in read_cells(file)), "")
    heading, _, text = first.partition("\n")
    question = re.search(r"^\*\*Question\.\*\* (.*)$", text, re.MULTILINE)
    title = heading.lstrip("# ") or file.stem
    return Notebook(f"{EXPLORE}/{file.stem}", title, question[1] if question else "", file, interactive=True)


def _fault(row: object) -> str | None:
    """What is wrong with a row by itself, in words."""
    if not isinstance(row, dict):
        return "expected fields such as 'id: fig01'"
    place = () if "file" in row else ("slug",)
    if missing := [name for name in (*REQUIRED, *place) if name not in row]:
        return f"{', '.join(missing)} is missing"
    if stray := [name for name in row if name not in FIELDS]:
        return f"unknown field {stray[0]!r}; choose from: {', '.join(FIELDS)}"
    if wrong := [name for name, value in row.items() if not isinstance(value, str) or not value.strip()]:
        return f"{wrong[0]} is {row[wrong[0]]!r}; expected text (in quotes, where YAML reads something else)"
    if not ID.fullmatch(row["id"]):
        return f"id {row['id']!r}: expected small letters, digits and underscores"
    if bad := [name for name, form in NAMES.items() if name in row and not form.fullmatch(row[name])]:
        return f"{bad[0]} {row[bad[0]]!r}: expected letters, digits, _ and -" + ", with .ipynb" * (bad[0] == "file")
    if (paper := row.get("paper")) and paper not in PAPERS:
        return f"unknown paper {paper!r}; choose from: {', '.join(PAPERS)}, or add it to toolkit/evidence/literature.py"
    return None


def _misnamed(row: dict, expected: Path) -> str | None:
    """What is wrong with the row's notebook file; one that is not there yet is fine, unless the row names it."""
    if expected.is_file():
        return None
    others = sorted(file.name for file in expected.parent.glob(f"{row['id']}_*.ipynb"))
    if "file" in row or others:
        return f"there is no {expected}" + (f", but {others[0]}; file and slug must agree" if others else "")
    return None


def _label(row: object) -> str:
    named = [str(row[key]) for key in ("paper", "id") if key in row] if isinstance(row, dict) else []
    return "/".join(named) or repr(row)[:60]


def _notebook(row: dict, presets: dict) -> Notebook:
    id = "/".join(part for part in (row.get("paper"), row["id"]) if part)
    file = row.get("file") or f"{id}_{row['slug']}.ipynb"
    settings = dict(presets.get(id) or {})
    alone = settings.pop("alone", False)
    if stray := set(settings) - set(PRESETS):
        raise unknown(f"preset of {id} in notebooks/presets.yaml", sorted(stray)[0], PRESETS)
    return Notebook(id, row["title"], row["question"], paths.root() / "notebooks" / file, alone, settings)


def _presets() -> dict[str, dict]:
    file = paths.root() / "notebooks" / "presets.yaml"
    presets = load_yaml(file) or {}
    check(presets, SETTINGS, file)
    return presets


def _without_magics(source: str) -> str:
    return "\n".join("" if line.lstrip().startswith(("%", "!")) else line for line in source.splitlines())

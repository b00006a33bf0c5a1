"""The notebooks there are, by what their files say, with the presets of `notebooks/presets.yaml`.

Files are read as plain JSON: to import nbformat takes longer than all else that the command line does at its start.

A notebook's first cell has its title and its question; the first argument of its `Run` is its id, `<paper>/<row>`.

A file may make several figures of a kind: its `Run` has the id `f"<paper>/{figure}"`, and each figure has a text cell
with its own title and question. Cells tagged with a figure's name belong to that figure alone, cells tagged `figures`
to the file. A parameter that is None has the figure's own value in `presets.yaml`; where there is none, it is not a
parameter of that figure.
"""

import ast
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from toolkit import paths, sources
from toolkit.errors import UserError, unknown
from toolkit.evidence.literature import PAPERS
from toolkit.records import checked, load_yaml

PARAMETERS = "parameters"  # the tag of the cell that assigns them
INJECTED = "injected-parameters"  # papermill's tag of the cell that it puts behind the defaults
PRESETS = ("quick", "standard", "paper")
EXPLORE = "explore"  # the folder of explorers, and the part of their ids before the slash
OWN = "own"  # a figure's values of the parameters that its file leaves open, in `presets.yaml`
FIGURES = "figures"  # the tag of cells that belong to a file of several figures, and to none of them
FIGURE = "figure"  # the parameter that chooses among the figures of a file
RUN = re.compile(r"""\bRun\(f?["']([a-z0-9_/]+(?:\{figure\})?)["'], globals\(\)\)""")
TITLE = re.compile(r"\A\s*##? (.*)\n?")
QUESTION = re.compile(r"^\*\*Question\.\*\* +((?:.+\n?)+)", re.MULTILINE)
SETTINGS = dict[str, dict[str, bool | dict[str, Any] | None] | None]  # of `alone`, and of each preset


@dataclass(frozen=True)
class Cell:
    """One cell of a notebook file."""

    kind: str
    source: str
    tags: tuple[str, ...]


@dataclass(frozen=True)
class Notebook:
    """One figure or table. `id` is `<paper>/<row>`; `alone`: it times things, so it shares the machine with none.

    `interactive`: an explorer, which has controls in the place of parameters, and leaves no results.
    `figure`: its name in a file of several, with its `own` values of that file's parameters.
    """

    id: str
    title: str
    question: str
    path: Path
    alone: bool = False
    presets: dict[str, dict] = field(default_factory=dict)
    interactive: bool = False
    figure: str = ""
    own: dict[str, Any] = field(default_factory=dict)

    @property
    def paper(self) -> str:
        """The paper that the figure is from; a grid puts the name of the point before it."""
        return self.id.split("/")[-2:][0]

    @cached_property
    def parameters(self) -> dict[str, object]:
        """The defaults of the `parameters` cell: preset `standard`. A figure's own take the place of None."""
        if self.interactive:
            return {}
        defaults = read_parameters(self.path)
        _check_names(self.id, self.own, defaults)
        if not self.figure:
            return defaults
        return {name: value for name, value in (defaults | self.own).items() if value is not None and name != FIGURE}

    def settings(self, parameters: Mapping[str, object]) -> dict[str, object]:
        """All that a run assigns behind the file's `parameters` cell: these parameters, and which figure."""
        return ({FIGURE: self.figure} if self.figure else {}) | parameters

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
        _check_names(self.id, overrides, self.parameters)
        return self.parameters | overrides


def notebooks() -> dict[str, Notebook]:
    """The notebooks by id: those of no paper first, then paper by paper in the order of `literature.PAPERS`.

    Raises `UserError` for a file that is no notebook, gives no id to `Run` or names none of its figures, for an id that
    two files have, an id of an unknown paper, and presets of a notebook that is not there.
    """
    folder = paths.root() / "notebooks"
    presets = checked(load_yaml(folder / "presets.yaml") or {}, SETTINGS, folder / "presets.yaml")
    found: dict[str, Notebook] = {}
    for file in [*sorted(folder.glob("*.ipynb")), *sorted(folder.glob("*/*.ipynb"))]:
        if file.parent.name != EXPLORE:
            for notebook in _notebooks(file, presets):
                if notebook.id in found:
                    raise UserError(f"{file}: {found[notebook.id].path.name} has the id {notebook.id!r}, too")
                found[notebook.id] = notebook
    if stray := set(presets) - set(found):
        raise UserError(f"notebooks/presets.yaml: there is no notebook {', '.join(sorted(stray))}")
    papers = [*PAPERS]

    def place(id: str) -> tuple[int, str]:
        return papers.index(id.split("/")[0]) if "/" in id else -1, id

    return {id: found[id] for id in sorted(found, key=place)}


def explorers() -> dict[str, Notebook]:
    """The notebooks of `notebooks/explore/`, by id. Raises `UserError` for a file that is no notebook."""
    return {each.id: each for each in map(_explorer, sorted((paths.root() / "notebooks" / EXPLORE).glob("*.ipynb")))}


def listing(books: Mapping[str, Notebook]) -> str:
    """Notebooks, a line each: id and question."""
    return "\n".join(f"{id:27} {book.question}" for id, book in books.items())


def parameter_words(values: Mapping[str, object]) -> str:
    """Parameters with their values, for a title: of a path its last part."""

    def shown(value: object) -> str:
        if isinstance(value, list):
            return ", ".join(map(shown, value))
        return Path(value).name if isinstance(value, str) and value.startswith("/") else str(value)

    return "; ".join(f"{name} {shown(value)}" for name, value in values.items())


def find(id: str) -> Notebook:
    """The notebook of that id. Raises `UserError` that lists the ids there are."""
    known = notebooks()
    if id not in known:
        raise unknown("notebook", id, known)
    return known[id]


def select(names: list[str]) -> list[Notebook]:
    """The notebooks with these ids or of these papers, in their order; all of them for no names."""
    known = notebooks()
    papers = {notebook.paper for notebook in known.values()}
    if stray := [name for name in names if name not in known and name not in papers]:
        if stray[0].partition("/")[0] == EXPLORE:
            raise UserError(f"{stray[0]}: explorers are opened by hand, in JupyterLab: notebooks/{EXPLORE}/")
        raise unknown("notebook or paper", stray[0], papers | set(known))
    return [book for book in known.values() if not names or book.id in names or book.paper in names]


def heading(first: str) -> tuple[str, str, str]:
    """Title and question of a notebook's first cell, empty where it has none, and the rest of its text."""
    title, text = TITLE.match(first), TITLE.sub("", first)
    question = QUESTION.search(text)
    rest = QUESTION.sub("", text, count=1).strip()
    return title[1].strip() if title else "", " ".join(question[1].split()) if question else "", rest


def cells_of(cells: list[dict], figure: str) -> list[dict]:
    """The cells, as JSON, that belong to a figure of a file of several; all of them for no figure."""

    def belongs(cell: dict) -> bool:
        named = _figures(cell.get("metadata", {}).get("tags", ()))
        return not named or figure in named

    return [cell for cell in cells if not figure or belongs(cell)]


def read_cells(notebook: Path) -> list[Cell]:
    """The cells of a notebook. Raises `UserError` if the file is no notebook."""
    try:
        cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
        return [
            Cell(cell["cell_type"], "".join(cell["source"]), tuple(cell["metadata"].get("tags", ()))) for cell in cells
        ]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(f"{notebook}: not a readable notebook ({type(error).__name__}: {error})") from error


def read_parameters(notebook: Path) -> dict[str, object]:
    """Names and default values of a notebook's `parameters` cell: assignments of plain literals and nothing else.

    Raises `UserError` if there is no such cell or it holds anything else.
    """
    tagged = [cell for cell in read_cells(notebook) if cell.kind == "code" and PARAMETERS in cell.tags]
    if len(tagged) != 1:
        raise UserError(f"{notebook}: expected one cell tagged {PARAMETERS!r}, found {len(tagged)}")
    try:
        return dict(_literal(statement) for statement in ast.parse(tagged[0].source).body)
    except (ValueError, SyntaxError) as error:
        raise UserError(f"{notebook}: the parameters cell may only assign plain literals ({error})") from error


def _literal(statement: ast.stmt) -> tuple[str, object]:
    match statement:
        case ast.Assign(targets=[ast.Name(id=name)], value=value):
            return name, ast.literal_eval(value)
        case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
            return name, ast.literal_eval(value)
    raise ValueError(f"line {statement.lineno}: {ast.unparse(statement)}")


def _explorer(file: Path) -> Notebook:
    title, question, _ = heading("".join(cell.source for cell in read_cells(file)[:1]))
    return Notebook(f"{EXPLORE}/{file.stem}", title or file.stem, question, file, interactive=True)


def _notebooks(file: Path, presets: dict) -> list[Notebook]:
    """The notebook of a file, or that of each of its figures."""
    cells = read_cells(file)
    id = next((run[1] for cell in cells if cell.kind == "code" and (run := RUN.search(cell.source))), None)
    if id is None:
        raise UserError(f'{file}: no cell has Run("<paper>/<id>", globals()), which names the notebook')
    if "/" in id and id.split("/")[0] not in PAPERS:
        paper = unknown("paper", id.split("/")[0], PAPERS)
        raise UserError(f"{file}: {paper}; add a new one to toolkit/evidence/literature.py")
    if not id.endswith(f"{{{FIGURE}}}"):
        return [_notebook(id, file, "".join(cell.source for cell in cells[:1]), presets)]
    asking = [cell for cell in cells if cell.kind == "markdown" and heading(cell.source)[1]]
    texts = {name: cell.source for cell in asking for name in _figures(cell.tags) - {FIGURES}}
    if not texts:
        raise UserError(f"{file}: no text cell that asks a question is tagged with the name of a figure")
    return [_notebook(id.format(figure=name), file, text, presets, name) for name, text in texts.items()]


def _notebook(id: str, file: Path, text: str, presets: dict, figure: str = "") -> Notebook:
    settings = dict(presets.get(id) or {})
    alone, own = settings.pop("alone", False), settings.pop(OWN, None)
    if stray := set(settings) - set(PRESETS):
        raise unknown(f"preset of {id} in notebooks/presets.yaml", sorted(stray)[0], PRESETS)
    title, question, _ = heading(text)
    return Notebook(id, title or id, question, file, alone, settings, figure=figure, own=own or {})


def _figures(tags: Iterable[str]) -> set[str]:
    """The tags that name a figure or a table."""
    return {tag for tag in tags if tag.startswith(("fig", "tab"))}


def _check_names(id: str, values: Mapping[str, object], parameters: Mapping[str, object]) -> None:
    if stray := set(values) - set(parameters):
        raise UserError(f"notebooks/presets.yaml: {id} has no parameter {', '.join(sorted(stray))}")


def _without_magics(source: str) -> str:
    return "\n".join("" if line.lstrip().startswith(("%", "!")) else line for line in source.splitlines())

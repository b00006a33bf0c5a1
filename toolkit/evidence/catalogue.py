"""The notebooks there are: one row of `data/catalogue.yaml` each, with the presets of `notebooks/presets.yaml`."""

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from toolkit import paths, sources
from toolkit.errors import UserError, unknown
from toolkit.evidence.parameters import read_cells, read_parameters
from toolkit.records import check, load_yaml

PRESETS = ("quick", "standard", "paper")
NAME = {"type": "string", "pattern": r"^[A-Za-z0-9_-]+\Z"}
TEXT = {"type": "string", "minLength": 1}
ROWS = {
    "type": "array",
    "items": {
        "type": "object",
        "required": ["id", "title", "question"],
        "properties": {
            "paper": NAME,
            "id": NAME,
            "slug": NAME,
            "file": {"type": "string", "pattern": r"^([A-Za-z0-9_-]+/)*[A-Za-z0-9_-]+\.ipynb\Z"},
            "title": TEXT,
            "question": TEXT,
        },
        "anyOf": [{"required": ["slug"]}, {"required": ["file"]}],
        "additionalProperties": False,
    },
}
SETTINGS = {
    "type": "object",
    "additionalProperties": {
        "type": ["object", "null"],
        "properties": {"alone": {"type": "boolean"}} | {name: {"type": ["object", "null"]} for name in PRESETS},
    },
}


@dataclass(frozen=True)
class Notebook:
    """One figure or table. `id` is `<paper>/<row>`; `alone`: it times things, so it shares the machine with none."""

    id: str
    title: str
    question: str
    path: Path
    alone: bool = False
    presets: dict[str, dict] = field(default_factory=dict)

    @property
    def paper(self) -> str:
        """The paper that the figure is from."""
        return self.id.split("/")[0]

    @cached_property
    def parameters(self) -> dict[str, object]:
        """The defaults of the `parameters` cell: preset `standard`."""
        return read_parameters(self.path)

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


def rows() -> dict[str, Notebook]:
    """Every row of the catalogue, by id, also those that have no notebook yet."""
    presets, listed = _presets(), load_yaml(file := paths.root() / "data" / "catalogue.yaml")
    check(listed, ROWS, file)
    found: dict[str, Notebook] = {}
    for notebook in (_notebook(row, presets) for row in listed):
        if notebook.id in found:
            raise UserError(f"{file}: row {notebook.id}: the id is used twice; expected one of its own")
        found[notebook.id] = notebook
    if stray := set(presets) - set(found):
        raise UserError(f"notebooks/presets.yaml: {', '.join(sorted(stray))} is not in data/catalogue.yaml")
    return found


def find(id: str) -> Notebook:
    """The notebook of that id. Raises `UserError` that lists the ids there are."""
    known = notebooks()
    if id not in known:
        raise unknown("notebook", id, known)
    return known[id]


def select(names: list[str]) -> list[Notebook]:
    """The notebooks with these ids or of these papers, in the catalogue's order; all of them for no names."""
    known = notebooks()
    papers = {notebook.paper for notebook in known.values()}
    if stray := [name for name in names if name not in known and name not in papers]:
        raise unknown("notebook or paper", stray[0], papers | set(known))
    return [book for book in known.values() if not names or book.id in names or book.paper in names]


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

"""Copies of the notebooks to work in: `<folder>/<id>.ipynb`, with a preset's parameters.

Each copy remembers the cells that it was made with: one that nobody changed follows its notebook and the preset.
`contents.ipynb` lists them.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import quote

from toolkit import paths, sources
from toolkit.errors import unknown
from toolkit.evidence.catalogue import (
    INJECTED,
    PARAMETERS,
    PRESETS,
    Notebook,
    cells_of,
    explorers,
    notebooks,
    read_parameters,
)
from toolkit.files import disk_trouble_told, make_folder, read_json, write_json

FIRST_STEP = """\
**First step:** open [{title}]({address}) and choose *Run → Run All Cells*. Each notebook begins with its parameters: \
change one and run it again. Nothing that you change here reaches the repository or the sweep's results."""
COPIED = "toolkit_copy_of"  # metadata of a copy: the digest of the cells that it was made from


def copy_notebooks(folder: Path, preset: str = "standard") -> list[str]:
    """Copy every notebook that has no copy, or whose copy nobody changed; a line for each copy that is left behind.

    A cell behind the parameters assigns what the preset changes. Raises `UserError` for an unknown preset, and for
    trouble with the disk.
    """
    if preset not in PRESETS:
        raise unknown("preset", preset, PRESETS)
    with disk_trouble_told(folder):
        return [line for notebook in _every() if (line := _copy(notebook, folder, preset))]


def write_contents(folder: Path, preset: str, takes: Mapping[str, str]) -> Path:
    """A notebook that lists the copies: title with a link, how long each `takes` where that is known, and question."""
    first = next(iter(notebooks().values()))
    step = FIRST_STEP.format(title=first.title, address=f"{quote(first.id)}.ipynb")
    lines = [
        f"# Notebooks, with preset {preset}",
        "",
        step,
        "",
        "| notebook | takes about | question |",
        "|---|---|---|",
    ]
    for each in _every():
        time = takes.get(each.id, "sliders" if each.interactive else "–")
        lines.append(f"| [{each.title}]({quote(each.id)}.ipynb) | {time} | {each.question} |")
    cell = {"cell_type": "markdown", "id": "contents", "metadata": {}, "source": "\n".join(lines)}
    kernel = {"name": "python3", "display_name": "Python 3 (ipykernel)", "language": "python"}  # else the Lab asks
    book = {"cells": [cell], "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}
    write_json(make_folder(folder) / paths.CONTENTS, book)
    return folder / paths.CONTENTS


def _every() -> list[Notebook]:
    """Explorers first: they need no wait."""
    return [*explorers().values(), *notebooks().values()]


def _copy(notebook: Notebook, folder: Path, preset: str) -> str | None:
    copy = folder / f"{notebook.id}.ipynb"
    content = json.loads(notebook.path.read_text(encoding="utf-8"))
    content["cells"] = cells_of(content["cells"], notebook.figure)
    _set_parameters(content, notebook, preset)
    original = _digest(content)
    if copy.exists():
        made_from = (book := read_json(copy)).get("metadata", {}).get(COPIED)
        if made_from == original:
            return None
        if made_from is None or made_from != _digest(book):
            return f"{copy} was changed and is not {notebook.path.name} with preset {preset}: rename it to get that"
    content.setdefault("metadata", {})[COPIED] = original
    copy.parent.mkdir(parents=True, exist_ok=True)
    write_json(copy, content)
    return None


def _set_parameters(content: dict, notebook: Notebook, preset: str) -> None:
    """Put a cell behind the parameters, as papermill does, if preset or figure change any."""
    if notebook.interactive:
        return
    defaults, settings = read_parameters(notebook.path), notebook.settings(notebook.preset(preset))
    changed = {name: value for name, value in settings.items() if value != defaults[name]}
    if not changed:
        return
    lines = [f"# preset {preset}", *(f"{name} = {value!r}" for name, value in changed.items())]
    cell = {"cell_type": "code", "id": INJECTED, "metadata": {"tags": [INJECTED]}, "execution_count": None}
    tagged = [PARAMETERS in each["metadata"].get("tags", ()) for each in content["cells"]]
    content["cells"].insert(tagged.index(True) + 1, cell | {"outputs": [], "source": "\n".join(lines)})


def _digest(book: dict) -> str:
    """The checksum of a notebook's cells without their outputs."""
    return sources.digest(*(f"{cell['cell_type']}\0{''.join(cell['source'])}" for cell in book["cells"]))

"""JupyterLab on copies of the notebooks: `results/lab/<id>.ipynb`, beside what they save in `results/lab/<id>/`.

What is tried out there changes neither the repository nor the sweep's results. Each copy remembers the cells that it
was made with: a copy that nobody changed follows its notebook and the preset. `results/lab/contents.ipynb` lists them.
"""

import json
import os
import sys
from urllib.parse import quote

from toolkit import paths, sources
from toolkit.errors import unknown
from toolkit.evidence.catalogue import PRESETS, Notebook, notebooks
from toolkit.evidence.page import INJECTED
from toolkit.evidence.parameters import PARAMETERS
from toolkit.files import make_folder, read_json, write_json
from toolkit.sweep.forecast import duration, forecast
from toolkit.sweep.plan import Job, cores

CONTENTS = "contents.ipynb"
COPIED = "toolkit_copy_of"  # metadata of a copy: the digest of the cells that it was made from


def start(options: list[str], preset: str = "standard") -> None:
    """Bring the copies up to date and become JupyterLab, which opens their contents; `options` go to it.

    Raises `UserError` for an unknown preset.
    """
    if preset not in PRESETS:
        raise unknown("preset", preset, PRESETS)
    for line in copy_notebooks(preset):
        print(line)
    lab, root = paths.lab_dir().resolve(), paths.root()
    if not lab.is_relative_to(root):  # `$TOOLKIT_RESULTS_DIR` is elsewhere
        root = lab.parent
    _write_contents(preset)
    print(f"Notebooks to try things in: {lab} (copies with preset {preset}; the sweep runs notebooks/)", flush=True)
    as_root = ["--allow-root"] if os.geteuid() == 0 else []  # in a container, as a rule
    url = f"/lab/tree/{quote((lab / CONTENTS).relative_to(root).as_posix())}"
    places = [f"--ServerApp.root_dir={root}", f"--LabApp.default_url={url}"]
    os.execv(sys.executable, [sys.executable, "-P", "-m", "jupyterlab", *places, *as_root, *options])


def copy_notebooks(preset: str = "standard") -> list[str]:
    """Copy every notebook that has no copy, or whose copy nobody changed; a line for each copy that is left behind.

    A cell behind the parameters assigns what the preset changes.
    """
    return [line for notebook in notebooks().values() if (line := _copy(notebook, preset))]


def _copy(notebook: Notebook, preset: str) -> str | None:
    copy = paths.lab_dir() / f"{notebook.id}.ipynb"
    content = json.loads(notebook.path.read_text(encoding="utf-8"))
    _set_parameters(content, notebook, preset)
    original = _digest(content)
    if copy.exists():
        made_from = _mapping(read_json(copy).get("metadata")).get(COPIED)
        if made_from == original:
            return None
        if made_from is None or made_from != _digest(read_json(copy)):
            return f"{copy} was changed and is not {notebook.path.name} with preset {preset}: rename it to get that"
    content["metadata"] = _mapping(content.get("metadata")) | {COPIED: original}
    copy.parent.mkdir(parents=True, exist_ok=True)
    write_json(copy, content)
    return None


def _set_parameters(content: dict, notebook: Notebook, preset: str) -> None:
    """Put a cell behind the parameters, as papermill does, if the preset changes any."""
    changed = {name: value for name, value in notebook.preset(preset).items() if value != notebook.parameters[name]}
    if not changed:
        return
    lines = [f"# preset {preset}", *(f"{name} = {value!r}" for name, value in changed.items())]
    cell = {"cell_type": "code", "id": INJECTED, "metadata": {"tags": [INJECTED]}, "execution_count": None}
    tags = [_mapping(each.get("metadata")).get("tags", ()) for each in content["cells"]]
    place = next(number for number, found in enumerate(tags) if PARAMETERS in found)
    content["cells"].insert(place + 1, cell | {"outputs": [], "source": "\n".join(lines)})


def _write_contents(preset: str) -> None:
    """A notebook that lists all others: title with a link, question, and how long it takes where that is known."""
    lines = [f"# Notebooks, with preset {preset}", "", "| notebook | question | takes about |", "|---|---|---|"]
    jobs = [
        Job(each.id, each.title, str(each.path), each.preset(preset), "", cores(), each.alone)
        for each in notebooks().values()
    ]
    seconds = forecast(jobs, 1).seconds
    for job, each in zip(jobs, notebooks().values(), strict=True):
        takes = duration(seconds[job.id]) if job.id in seconds else "–"
        lines.append(f"| [{each.title}]({quote(each.id)}.ipynb) | {each.question} | {takes} |")
    cell = {"cell_type": "markdown", "id": "contents", "metadata": {}, "source": "\n".join(lines)}
    book = {"cells": [cell], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}
    write_json(make_folder(paths.lab_dir()) / CONTENTS, book)


def _digest(book: dict) -> str | None:
    """Of a notebook's cells without their outputs; None for a file that is no notebook."""
    cells = book.get("cells")
    if not isinstance(cells, list) or not all(isinstance(cell, dict) for cell in cells):
        return None
    return sources.digest(*(f"{cell.get('cell_type')}\0{_joined(cell.get('source'))}" for cell in cells))


def _joined(source: object) -> str:
    return "".join(map(str, source)) if isinstance(source, list) else str(source)


def _mapping(value: object) -> dict:
    return value if isinstance(value, dict) else {}

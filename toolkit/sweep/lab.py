"""JupyterLab on copies of the notebooks: `results/lab/<id>.ipynb`, beside what they save in `results/lab/<id>/`.

What is tried out there changes neither the repository nor the sweep's results. Each copy remembers which version of
the notebook it was made from: a copy that nobody changed follows its notebook.
"""

import json
import os
import sys
from pathlib import Path
from urllib.parse import quote

from toolkit import paths, sources
from toolkit.errors import UserError
from toolkit.evidence.catalogue import Notebook, notebooks
from toolkit.evidence.parameters import read_cells
from toolkit.files import read_json, write_json

COPIED = "toolkit_copy_of"  # metadata of a copy: the digest of the cells that it was made from


def start(options: list[str]) -> None:
    """Bring the copies up to date and become JupyterLab, which opens their folder; `options` go to it."""
    for line in copy_notebooks():
        print(line)
    lab, root = paths.lab_dir().resolve(), paths.root()
    if not lab.is_relative_to(root):  # `$TOOLKIT_RESULTS_DIR` is elsewhere
        root = lab.parent
    print(f"Notebooks to try things in: {lab} (copies; those in notebooks/ are what the sweep runs)", flush=True)
    as_root = ["--allow-root"] if os.geteuid() == 0 else []  # in a container, as a rule
    url = f"/lab/tree/{quote(lab.relative_to(root).as_posix())}"
    places = [f"--ServerApp.root_dir={root}", f"--LabApp.default_url={url}"]
    os.execv(sys.executable, [sys.executable, "-P", "-m", "jupyterlab", *places, *as_root, *options])


def copy_notebooks() -> list[str]:
    """Copy every notebook that has no copy, or whose copy nobody changed; a line for each copy that is left behind."""
    return [line for notebook in notebooks().values() if (line := _copy(notebook))]


def _copy(notebook: Notebook) -> str | None:
    copy = paths.lab_dir() / f"{notebook.id}.ipynb"
    original = _digest(notebook.path)
    if copy.exists():
        made_from = _mapping(read_json(copy).get("metadata")).get(COPIED)
        if made_from == original:
            return None
        if made_from is None or made_from != _digest(copy):
            return f"{copy} was changed and is not of the {notebook.path.name} of now: rename it to get that"
    content = json.loads(notebook.path.read_text(encoding="utf-8"))
    content["metadata"] = _mapping(content.get("metadata")) | {COPIED: original}
    copy.parent.mkdir(parents=True, exist_ok=True)
    write_json(copy, content)
    return None


def _digest(notebook: Path) -> str | None:
    """Of the cells without their outputs; None for a file that is no notebook."""
    try:
        return sources.digest(*(f"{cell.kind}\0{cell.source}" for cell in read_cells(notebook)))
    except UserError:
        return None


def _mapping(value: object) -> dict:
    return value if isinstance(value, dict) else {}

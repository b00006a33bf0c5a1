"""A toy checkout: this project's code with two small notebooks of its own, safe to break."""

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import nbformat
import pytest

from toolkit import paths
from toolkit.evidence.literature import PAPERS, Paper
from toolkit.sweep.__main__ import main

SAVE = "run.evidence(pd.DataFrame({'value': [value, helper()]}), 'packing helps.', evidence='measured')"
HEAD = "import pandas as pd\nfrom toolkit.evidence.run import Run\nrun = Run('{id}', globals())"


@pytest.fixture(autouse=True)
def _paper(monkeypatch):
    """The toy's notebooks belong to a paper, here as in the checkout."""
    monkeypatch.setitem(PAPERS, "toy", Paper("Toy"))


@dataclass
class Checkout:
    """A folder to run the sweep in; `log` holds a line for each notebook execution."""

    root: Path
    elsewhere: Path | None = None  # where results go, if not into the checkout

    @property
    def results(self) -> Path:
        return self.elsewhere or self.root / "results"

    @property
    def environment(self) -> dict[str, str]:
        ours = {"PYTHONPATH": str(self.root), "TOY_LOG": str(self.root / "log")}
        return {**os.environ, **ours} | ({"TOOLKIT_RESULTS_DIR": str(self.elsewhere)} if self.elsewhere else {})

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-P", "-m", "toolkit.sweep", *arguments]

    def sweep(self, *arguments: str) -> subprocess.CompletedProcess:
        return subprocess.run(
            self.command(*arguments), env=self.environment, capture_output=True, text=True, timeout=240, check=False
        )

    def executed(self) -> list[str]:
        """The notebooks executed since the last call, sorted."""
        log = self.root / "log"
        lines = log.read_text().split() if log.exists() else []
        log.unlink(missing_ok=True)
        return sorted(lines)

    def stamp(self, id: str) -> dict:
        return json.loads((self.results / id / "done.json").read_text())

    def notebook(self, name: str, module: str, body: str = "", parameters: str = "value = 1\nlabel = 'x'") -> None:
        id = f"toy/{name}"
        log = f"import os\nwith open(os.environ['TOY_LOG'], 'a') as log:\n    print('{id}', file=log)"
        cells = [
            nbformat.v4.new_markdown_cell(f"# {name}\n\n**Question.** {name}?"),
            nbformat.v4.new_code_cell(parameters, metadata={"tags": ["parameters"]}),
            *map(nbformat.v4.new_code_cell, (HEAD.format(id=id), f"from toolkit.{module} import helper\n{log}")),
            *map(nbformat.v4.new_code_cell, (body, SAVE)),
        ]
        self.book(name).parent.mkdir(parents=True, exist_ok=True)
        nbformat.write(nbformat.v4.new_notebook(cells=cells), self.book(name))

    def book(self, name: str) -> Path:
        return self.root / "notebooks" / "toy" / f"{name}_toy.ipynb"

    def explorer(self, name: str, code: str) -> None:
        """A notebook with a heading, a question and one cell of code."""
        first = nbformat.v4.new_markdown_cell(f"# Explore: {name}\n\n**Question.** Which {name}?")
        folder = self.root / "notebooks" / "explore"
        folder.mkdir(exist_ok=True)
        nbformat.write(
            nbformat.v4.new_notebook(cells=[first, nbformat.v4.new_code_cell(code)]), folder / f"{name}.ipynb"
        )


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch) -> Checkout:
    """For what this process does. Its toolkit is links, so a process that ran it would use the real checkout."""
    (tmp_path / "toolkit").mkdir()
    for entry in (paths.root() / "toolkit").iterdir():
        (tmp_path / "toolkit" / entry.name).symlink_to(entry)
    toy = _with_notebooks(Checkout(tmp_path))
    monkeypatch.setattr(paths, "root", lambda: toy.root)
    return toy


def make_checkout(place: Path, results: Path | None = None) -> Checkout:
    """For what processes do: with a copy of the toolkit, whose fork server imports no large library, and serves two."""
    shutil.copytree(paths.root() / "toolkit", place / "toolkit")
    heavy = r' +"(torch|numba|scipy\.stats|seaborn|transformers\.[\w.]+|safetensors\.torch)",\n'
    for name, old, new, times in (
        ("evidence/literature.py", r"\Z", '\nPAPERS["toy"] = Paper("Toy")\n', 1),
        ("sweep/fork_server.py", heavy, "", 7),
        ("sweep/driver.py", "^FORKED = 4", "FORKED = 2", 1),
    ):
        file = place / "toolkit" / name
        changed, count = re.subn(old, new, file.read_text(), flags=re.MULTILINE)
        assert count == times
        file.write_text(changed)
    return _with_notebooks(Checkout(place, results))


def _with_notebooks(toy: Checkout) -> Checkout:
    data = toy.root / "data"
    data.mkdir()
    shutil.copy(paths.root() / "data" / "columns.yaml", data)
    for name, module in {"a": "alpha", "b": "beta"}.items():
        (toy.root / "toolkit" / f"{module}.py").write_text("def helper():\n    return 1\n")
        toy.notebook(name, module)
    (toy.root / "notebooks" / "presets.yaml").write_text("toy/a:\n  quick: {value: 7}\n  paper: {value: 2}\n")
    return toy


@pytest.fixture
def told(checkout: Checkout, monkeypatch, capfd):
    """Calls the command in this process, for what runs no notebook: a process of its own takes a second to start."""
    monkeypatch.setenv("TOOLKIT_RESULTS_DIR", "")  # the command sets it, and it is as before after the test

    def call(*arguments: str) -> subprocess.CompletedProcess:
        status = main([*arguments])
        found = capfd.readouterr()
        return subprocess.CompletedProcess(arguments, status, found.out, found.err)

    return call

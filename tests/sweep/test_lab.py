"""JupyterLab works on copies: what is tried out there reaches neither the repository nor the sweep's results."""

from pathlib import Path

import nbformat
import pytest

from toolkit import paths
from toolkit.errors import UserError
from toolkit.evidence.copies import copy_notebooks
from toolkit.files import make_folder, write_json
from toolkit.sweep import lab
from toolkit.sweep.jobs import STAMP

PYTHON = {"name": "python3", "display_name": "Python 3", "language": "python"}


def edit(copy, old: str, new: str) -> None:
    """Change a cell as the Lab does when it saves: with outputs and a kernel."""
    book = nbformat.read(copy, as_version=4)
    for cell in book.cells:
        cell.source = cell.source.replace(old, new)
        if cell.cell_type == "code":
            cell.outputs = [nbformat.v4.new_output("stream", text="seen")]
    book.metadata["kernelspec"] = PYTHON
    nbformat.write(book, copy)


def parameters(copy) -> str:
    return nbformat.read(copy, as_version=4).cells[1].source


def test_a_copy_follows_its_notebook_until_somebody_changes_it(checkout):
    copy = checkout.results / "lab" / "toy" / "a.ipynb"
    assert copy_notebooks(paths.lab_dir()) == []
    assert parameters(copy).startswith("value = 1")
    edit(copy, "nothing", "to change")  # only outputs
    before = copy.read_bytes()
    assert copy_notebooks(paths.lab_dir()) == []
    assert copy.read_bytes() == before
    checkout.notebook("a", "alpha", parameters="value = 2")
    assert copy_notebooks(paths.lab_dir()) == []
    assert parameters(copy) == "value = 2"
    edit(copy, "value = 2", "value = 3")
    assert copy_notebooks(paths.lab_dir()) == []
    checkout.notebook("a", "alpha", parameters="value = 4")
    (told,) = copy_notebooks(paths.lab_dir())
    assert str(copy) in told
    assert parameters(copy) == "value = 3"
    copy.write_text("of ones own")
    assert len(copy_notebooks(paths.lab_dir())) == 1
    assert copy.read_text() == "of ones own"


def test_each_figure_of_a_file_has_a_copy_with_its_own_cells_and_values(tmp_path, monkeypatch):
    monkeypatch.setenv("TOOLKIT_RESULTS_DIR", str(tmp_path))
    assert copy_notebooks(paths.lab_dir(), "quick") == []
    copies = {name: nbformat.read(paths.lab_dir() / "endor" / f"{name}.ipynb", 4).cells for name in ("fig08", "fig12")}
    for name, cells in copies.items():
        assert f"fig. {name[3:].lstrip('0')}" in cells[0].source
        assert {tag for cell in cells for tag in cell.metadata.get("tags", ())} <= {
            name,
            "parameters",
            "injected-parameters",
        }
        (set_here,) = (cell.source for cell in cells if "injected-parameters" in cell.metadata.get("tags", ()))
        assert ("measured_model = 'opt-66b/2'" in set_here) == (name == "fig12")
        assert "ops = [" in set_here
    assert "figure = 'fig12'" in copies["fig12"][2].source


def test_the_lab_opens_the_copies_and_takes_further_options(checkout, monkeypatch):
    for results, root, url in (
        ("results", "", "/lab/tree/results/lab/contents.ipynb"),
        ("../of mine #1", "../of mine #1", "/lab/tree/lab/contents.ipynb"),
    ):
        monkeypatch.setenv("TOOLKIT_RESULTS_DIR", str(checkout.root / results))
        calls = []
        monkeypatch.setattr(lab.os, "execv", lambda python, arguments, calls=calls: calls.append(arguments))
        lab.start(["--no-browser", "--port", "8899"])
        (arguments,) = calls
        assert f"--ServerApp.root_dir={(checkout.root / root).resolve()}" in arguments
        assert f"--LabApp.default_url={url}" in arguments
        assert arguments[-3:] == ["--no-browser", "--port", "8899"]
        book = nbformat.read(checkout.root / results / "lab" / "contents.ipynb", as_version=4)
        assert book.metadata["kernelspec"]["name"] == "python3"  # the Lab asks for a kernel otherwise
        folder = Path(next(each for each in arguments if "app_settings_dir" in each).partition("=")[2])
        assert '"fetchNews": "false"' in (folder / "overrides.json").read_text()
        contents = book.cells[0].source
        assert "**First step:** open [a](toy/a.ipynb)" in contents
        assert "| [a](toy/a.ipynb) | – | a? |" in contents


def lab_contents(checkout):
    return checkout.results / "lab" / "contents.ipynb"


def test_explorers_are_copied_as_they_are_and_listed_first(checkout, monkeypatch):
    checkout.explorer("dials", "dial = 1")
    monkeypatch.setattr(lab.os, "execv", lambda python, arguments: None)
    lab.start([], "quick")
    copy = checkout.results / "lab" / "explore" / "dials.ipynb"
    assert parameters(copy) == "dial = 1"
    contents = nbformat.read(lab_contents(checkout), as_version=4).cells[0].source
    lines = [line for line in contents.splitlines() if line.startswith("| [")]
    assert lines[0] == "| [Explore: dials](explore/dials.ipynb) | sliders | Which dials? |"
    assert len(lines) == 3
    write_json(make_folder(checkout.results / "explore" / "dials") / STAMP, {"key": "", "seconds": 31.6})
    lab.start([], "quick")  # drawn for the report, so it is known how long it takes
    assert "(explore/dials.ipynb) | 32 s |" in nbformat.read(lab_contents(checkout), as_version=4).cells[0].source


def test_copies_take_the_parameters_of_a_preset(checkout):
    copy = checkout.results / "lab" / "toy" / "a.ipynb"
    copy_notebooks(paths.lab_dir())
    assert copy_notebooks(paths.lab_dir(), "quick") == []
    quick = nbformat.read(copy, as_version=4)
    nbformat.validate(quick)
    assert quick.cells[2].source == "# preset quick\nvalue = 7"
    before = copy.read_bytes()
    assert copy_notebooks(paths.lab_dir(), "quick") == []
    assert copy.read_bytes() == before
    edit(copy, "value = 7", "value = 8")
    (told,) = copy_notebooks(paths.lab_dir())
    assert "not a_toy.ipynb with preset standard" in told
    edit(copy, "value = 8", "value = 7")
    assert copy_notebooks(paths.lab_dir()) == []
    assert parameters(copy) == "value = 1\nlabel = 'x'"
    with pytest.raises(UserError, match="preset"):
        lab.start([], "slow")

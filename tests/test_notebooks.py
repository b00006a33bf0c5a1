"""House rules of the notebooks, over every one there is."""

import ast
import json

import pytest

from toolkit import hub, paths
from toolkit.downloads import DOWNLOADS
from toolkit.evidence.catalogue import PRESETS, Notebook, notebooks, read_cells
from toolkit.models import check_model
from toolkit.quality import check_corpus

BOOKS = list(notebooks().values())
every_notebook = pytest.mark.parametrize("book", BOOKS, ids=[book.id for book in BOOKS])


def test_every_notebook_file_is_found():
    found = {path for path in (paths.root() / "notebooks").rglob("*.ipynb") if ".ipynb_checkpoints" not in path.parts}
    assert {book.path for book in BOOKS} == {path for path in found if path.parent.name != "explore"}


@every_notebook
def test_no_outputs_are_committed(book: Notebook):
    cells = json.loads(book.path.read_text())["cells"]
    assert [cell["id"] for cell in cells if cell.get("outputs") or cell.get("execution_count")] == []


@every_notebook
def test_presets_name_parameters_that_are_there(book: Notebook):
    for preset in PRESETS:
        assert book.preset(preset).keys() == book.parameters.keys()


@every_notebook
def test_quick_downloads_nothing_that_has_terms(book: Notebook):
    assert not {name for name in DOWNLOADS if DOWNLOADS[name].notice} & {*map(str, book.preset("quick").values())}


@every_notebook
def test_models_and_corpora_can_be_had_without_a_hub(book: Notebook, monkeypatch):
    """The sweep checks parameters of these names before it starts; twins go by other names."""
    monkeypatch.setattr(hub, "reachable", lambda: False)
    for preset in PRESETS:
        parameters = book.preset(preset)
        for name in {parameters.get("model"), parameters.get("second_model")} - {None, "none"}:
            check_model(name)
        if "corpus" in parameters:
            check_corpus(parameters["corpus"])


@every_notebook
def test_cells_are_short(book: Notebook):
    code = [cell.source for cell in read_cells(book.path) if cell.kind == "code" and "parameters" not in cell.tags]
    assert max(len(source.splitlines()) for source in code) <= 30


@every_notebook
def test_no_cell_overwrites_a_parameter(book: Notebook):
    """A cell that runs twice would take another value for what the reader has set."""
    for cell in read_cells(book.path):
        if cell.kind == "code" and "parameters" not in cell.tags:
            statements = ast.parse(cell.source).body
            targets = [node for one in statements if isinstance(one, ast.Assign) for node in ast.walk(one)]
            names = {node.id for node in targets if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
            inner = {
                node.id
                for one in targets
                if isinstance(one, ast.comprehension)
                for node in ast.walk(one.target)
                if isinstance(node, ast.Name)
            }
            assert not (names - inner) & book.parameters.keys()


@every_notebook
def test_it_opens_with_its_question_and_ends_with_what_was_seen(book: Notebook):
    cells = read_cells(book.path)
    assert cells[0].kind == "markdown"
    assert book.question.endswith("?")
    assert len(book.title) <= 70
    assert "run.evidence(" in cells[-1].source

"""House rules of the notebooks, over every one there is; failures are listed together."""

import ast
import inspect
import json
import re
from importlib import import_module

import pytest

from toolkit import hub, paths
from toolkit.downloads import DOWNLOADS
from toolkit.evidence.catalogue import PRESETS, explorers, notebooks, read_cells, read_parameters
from toolkit.models import check_model
from toolkit.quality import check_corpus
from toolkit.source_facts import facts

BOOKS = list(notebooks().values())
ALL = [*BOOKS, *explorers().values()]
SOLUTION = re.compile(r"\n\n<details><summary>Solution</summary>\n\n\S.*\S\n\n</details>$", re.DOTALL)


def test_every_notebook_file_is_found():
    found = {path for path in (paths.root() / "notebooks").rglob("*.ipynb") if ".ipynb_checkpoints" not in path.parts}
    assert {book.path for book in ALL} == found


def test_cells_are_short_and_have_no_outputs_and_the_first_asks_a_question():
    for book in ALL:
        cells = json.loads(book.path.read_text())["cells"]
        assert [cell["id"] for cell in cells if cell.get("outputs") or cell.get("execution_count")] == [], book.id
        code = [cell for cell in cells if cell["cell_type"] == "code" and not _is_parameters(cell)]
        assert max(len(cell["source"]) for cell in code) <= 30, book.id
        assert cells[0]["cell_type"] == "markdown", book.id
        assert book.question.endswith("?"), book.id
        assert len(book.title) <= 70, book.id
        last = "".join(code[-1]["source"])
        assert ("view.show(" if book.paper == "explore" else "run.evidence(") in last, book.id


def _is_parameters(cell: dict) -> bool:
    return "parameters" in cell["metadata"].get("tags", ())


def test_every_exercise_has_its_solution_in_a_fold():
    missing = set()
    for book in BOOKS:
        texts = [cell.source for cell in read_cells(book.path) if cell.kind == "markdown"]
        exercises = [text for text in texts if text.startswith("## Exercise")]
        missing |= {book.id for text in exercises or [""] if not SOLUTION.search(text)}
    assert not missing


def test_a_file_of_several_figures_names_each_of_them_and_has_a_title_of_its_own():
    for book in (book for book in BOOKS if book.figure):
        head, *cells = json.loads(book.path.read_text())["cells"]
        text, figures = "".join(head["source"]), {other.figure for other in BOOKS if other.path == book.path}
        assert head["metadata"]["tags"] == ["figures"], book.id
        assert f"| `{book.figure}` |" in text, book.id
        assert {tag for cell in cells for tag in cell["metadata"].get("tags", ())} <= figures | {"parameters"}, book.id
        assert read_parameters(book.path)["figure"] in figures, book.id


def test_presets_name_parameters_that_are_there():
    for book in BOOKS:
        for preset in PRESETS:
            assert book.preset(preset).keys() == book.parameters.keys(), book.id


def test_models_and_corpora_can_be_had_without_a_hub_and_quick_has_no_terms(monkeypatch):
    """The sweep checks parameters of these names before it starts; twins go by other names."""
    monkeypatch.setattr(hub, "reachable", lambda: False)
    with_terms = {name for name in DOWNLOADS if DOWNLOADS[name].notice}
    for book in BOOKS:
        assert not with_terms & {*map(str, book.preset("quick").values())}, book.id
        for preset in PRESETS:
            parameters = book.preset(preset)
            for name in {parameters.get("model"), parameters.get("second_model")} - {None, "none"}:
                check_model(name)
            if "corpus" in parameters:
                check_corpus(parameters["corpus"])


def test_no_cell_overwrites_a_parameter():
    """A cell that runs twice would take another value for what the reader has set."""
    for book in BOOKS:
        for cell in read_cells(book.path):
            if cell.kind == "code" and "parameters" not in cell.tags:
                assert not _assigned(cell.source) & book.parameters.keys(), book.id


def _assigned(source: str) -> set[str]:
    """Names that the statements of a cell assign, but for those within comprehensions."""
    nodes = [node for one in ast.parse(source).body if isinstance(one, ast.Assign) for node in ast.walk(one)]
    names = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    targets = [node.target for node in nodes if isinstance(node, ast.comprehension)]
    return names - {node.id for target in targets for node in ast.walk(target) if isinstance(node, ast.Name)}


MOST_NAMES = 65  # a reader of all notebooks must know them; fewer is better


def test_notebooks_import_no_more_names_than_they_did():
    """Names of a namespace, such as `tk.residency.Lru`, do not count: a reader finds them behind its dot."""
    names = set()
    for book in ALL:
        for cell in (cell for cell in read_cells(book.path) if cell.kind == "code"):
            for node in ast.walk(ast.parse(cell.source)):
                if isinstance(node, ast.ImportFrom) and node.module.split(".")[0] == "toolkit":
                    names |= {(node.module, alias.name) for alias in node.names}
                elif isinstance(node, ast.Import):
                    names |= {(alias.name, "") for alias in node.names if alias.name.split(".")[0] == "toolkit"}
    assert len(names) <= MOST_NAMES


@pytest.mark.parametrize("book", [pytest.param(book, id=book.id) for book in ALL])
def test_what_a_notebook_uses_of_the_toolkit_is_there(book):
    code = "\n".join(cell.source for cell in read_cells(book.path) if cell.kind == "code")
    for module, name, uses in facts(code).names:
        if module.split(".")[0] == "toolkit":
            for use in uses:
                found = _imported(module, name)
                for part in use.split("."):
                    if inspect.ismodule(found) and part:
                        assert hasattr(found, part), f"{found.__name__} has no {part}"
                        found = getattr(found, part)


def _imported(module: str, name: str) -> object:
    """The value that `from module import name` binds; the module itself without a name."""
    found = import_module(module)
    if not name:
        return found
    return getattr(found, name) if hasattr(found, name) else import_module(f"{module}.{name}")

"""Prose is plain: the subject of a sentence comes first, in docstrings, in notebooks' text and on pages."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from toolkit import paths
from toolkit.evidence.catalogue import read_cells

QUESTION = r"(?![^.?!]*\?)"  # questions may begin so
INVERTED = re.compile(r"(?:^|[.:;]\s|\n\n)\s*(?:[-*] )?(What|Of|Those|Such|Else)\b" + QUESTION)
NO_PROSE = re.compile(r"^```.*?^```|^#[^\n]*", re.MULTILINE | re.DOTALL)  # examples and headings


def docstrings(source: str) -> Iterator[str]:
    """The docstrings of Python code."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.value.value


def texts() -> Iterator[tuple[Path, str]]:
    """Each docstring, text cell and page, with its file."""
    root = paths.root()
    for folder in ("toolkit", "kernels", "tests", "benchmarks"):
        for path in (root / folder).rglob("*.py"):
            yield from ((path, text) for text in docstrings(path.read_text()))
    for path in (file for file in (root / "notebooks").rglob("*.ipynb") if ".ipynb_checkpoints" not in file.parts):
        for cell in read_cells(path):
            cell_texts = [cell.source] if cell.kind == "markdown" else docstrings(cell.source)
            yield from ((path, NO_PROSE.sub("", text)) for text in cell_texts)
    for path in (root / "README.md", root / "CONTRIBUTING.md", *root.glob("*/*.md")):
        yield path, NO_PROSE.sub("", path.read_text())


def test_no_sentence_begins_with_what_of_those_such_or_else():
    assert [f"{path}: {match[0]!r}" for path, text in texts() for match in INVERTED.finditer(text)] == []

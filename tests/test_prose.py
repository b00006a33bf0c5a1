"""Docstrings are plain sentences: the subject comes first."""

import ast
import re

from toolkit import paths

INVERTED = re.compile(r"(?:^|[.:;]\s|\n\n)\s*(What|Of|Those|Such|Else)\b")


def test_no_sentence_of_a_docstring_begins_with_what_of_those_such_or_else():
    found = []
    for folder in ("toolkit", "kernels"):
        for path in sorted((paths.root() / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                    text = node.value.value if isinstance(node.value.value, str) else ""
                    found += [f"{path}:{node.lineno}: {start}" for start in INVERTED.findall(text)]
    assert not found

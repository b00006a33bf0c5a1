"""The functions of a notebook, for tests of them: its measurements are not run."""

import ast
from functools import cache
from types import SimpleNamespace

from toolkit.evidence.catalogue import notebooks
from toolkit.evidence.parameters import read_cells


@cache
def functions_of(notebook: str) -> SimpleNamespace:
    """What the cells of a notebook import and define, by name: functions, classes, and constants in capitals."""
    path = notebooks()[notebook].path
    code = [cell.source for cell in read_cells(path) if cell.kind == "code"]
    body = [statement for source in code for statement in ast.parse(source).body if _defines(statement)]
    names: dict[str, object] = {"__name__": f"notebook {notebook}"}
    exec(compile(ast.Module(body, []), str(path), "exec"), names)
    return SimpleNamespace(**names)


def _defines(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.Assign):
        return all(isinstance(target, ast.Name) and target.id.isupper() for target in statement.targets)
    return isinstance(statement, ast.Import | ast.ImportFrom | ast.FunctionDef | ast.ClassDef)

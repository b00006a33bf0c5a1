"""The functions of a notebook, for tests of them: its measurements are not run."""

import ast
from functools import cache
from types import SimpleNamespace

from toolkit.evidence.catalogue import PARAMETERS, notebooks, read_cells


@cache
def functions_of(notebook: str) -> SimpleNamespace:
    """The names that a notebook imports and defines: parameters, functions, classes, and constants in capitals."""
    path = notebooks()[notebook].path
    cells = [cell for cell in read_cells(path) if cell.kind == "code"]
    body = [one for cell in cells for one in ast.parse(cell.source).body if PARAMETERS in cell.tags or _defines(one)]
    names: dict[str, object] = {"__name__": f"notebook {notebook}"}
    exec(compile(ast.Module(body, []), str(path), "exec"), names)
    return SimpleNamespace(**names)


def _defines(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.Assign):
        names = [node.id for target in statement.targets for node in ast.walk(target) if isinstance(node, ast.Name)]
        return all(name.isupper() for name in names)
    return isinstance(statement, ast.Import | ast.ImportFrom | ast.FunctionDef | ast.ClassDef)

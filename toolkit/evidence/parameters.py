"""A notebook's cells and its `parameters`, read without running it.

Plain JSON: importing nbformat takes longer than all else that the command line does before it starts.
"""

import ast
import json
from dataclasses import dataclass
from pathlib import Path

from toolkit.errors import UserError

PARAMETERS = "parameters"  # the tag of the cell that assigns them
INJECTED = "injected-parameters"  # papermill's tag of the cell that it puts behind the defaults


@dataclass(frozen=True)
class Cell:
    """One cell of a notebook file."""

    kind: str
    source: str
    tags: tuple[str, ...]


def read_cells(notebook: Path) -> list[Cell]:
    """The cells of a notebook. Raises `UserError` if the file is no notebook."""
    try:
        cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
        return [
            Cell(cell["cell_type"], "".join(cell["source"]), tuple(cell["metadata"].get("tags", ()))) for cell in cells
        ]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(f"{notebook}: not a readable notebook ({type(error).__name__}: {error})") from error


def read_parameters(notebook: Path) -> dict[str, object]:
    """Names and default values of a notebook's `parameters` cell: assignments of plain literals and nothing else.

    Raises `UserError` if there is no such cell or it holds anything else.
    """
    tagged = [cell for cell in read_cells(notebook) if cell.kind == "code" and PARAMETERS in cell.tags]
    if len(tagged) != 1:
        raise UserError(f"{notebook}: expected one cell tagged {PARAMETERS!r}, found {len(tagged)}")
    try:
        return dict(_literal(statement) for statement in ast.parse(tagged[0].source).body)
    except (ValueError, SyntaxError) as error:
        raise UserError(f"{notebook}: the parameters cell may only assign plain literals ({error})") from error


def _literal(statement: ast.stmt) -> tuple[str, object]:
    match statement:
        case ast.Assign(targets=[ast.Name(id=name)], value=value):
            return name, ast.literal_eval(value)
        case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
            return name, ast.literal_eval(value)
    raise ValueError(f"line {statement.lineno}: {ast.unparse(statement)}")

"""Numbers of kept tables in pages that people write: `python -m toolkit.evidence.cite` refreshes them.

A page has a number between two comments, which a reader of the page does not see:

    Packed weights are <!--cell endor/tab_e2e speedup method=endor_packed mapping=storage-->1.87<!--/--> times as fast.

The first comment is the address of a *cell*: table, column, and what tells its row apart. `endor/tab_e2e` is the
notebook's `table.csv`, `endor/tab_e2e/comparison` its `comparison.csv`, and `endor/tab_e2e/card` the few numbers of its
card in the report, by `label` and `value`; `scores` is the machine's own `scores.csv`. `endor/claims` are the paper's
published numbers (`data/claims/endor.yaml`), whatever the machine.
After `over`, the address of another row follows, by which the number is divided. A format of Python may come last
(`.0%`; else `.2f`), and `range` behind it adds the least and the most of the turns: "5.0 (4.9–5.1)". `headline.gain`
for a column is a sentence that the notebook has kept.

Long addresses have names in `data/cells.yaml`, and a comment may have the name instead: `<!--cell
endor-packed-->`. That file also names the machine, and that of notebooks whose results are of another one;
`epyc-zen5-2c:endor/tab_e2e` is a table of another one, and `.:scores` and `.:headlines` are tables of all of them.
"""

import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

import pandas as pd

from toolkit import paths
from toolkit.errors import UserError, run_command, unknown
from toolkit.evidence.claims import claims
from toolkit.files import read_json, replacing
from toolkit.records import load_yaml

PAGES = ("README.md", "docs/*.md", "results/reference/README.md")
CITED = re.compile(r"(<!--cell ([^>]*?)-->)(.*?)(<!--/-->)", re.DOTALL)
HEADLINE = "headline."
CARD, CLAIMS = "card", "claims"


def pages() -> list[Path]:
    """The files that cite cells."""
    return [file for pattern in PAGES for file in sorted(paths.checkout().glob(pattern))]


def citations(page: Path) -> list[tuple[str, str]]:
    """The cells of a page, in its order: the address or name in the comment, and the text between the comments."""
    return [(match[2], match[3]) for match in CITED.finditer(page.read_text(encoding="utf-8"))]


def refresh(page: Path, reference: Path) -> int:
    """Put the kept values into a page. Returns how many of its numbers have changed. Raises what `value` raises."""
    text, names = page.read_text(encoding="utf-8"), read_names()
    changed = sum(value(cell, reference, names) != shown for cell, shown in citations(page))
    if changed:
        new = CITED.sub(lambda match: f"{match[1]}{value(match[2], reference, names)}{match[4]}", text)
        with replacing(page) as file:
            file.write_text(new, encoding="utf-8")
    return changed


def read_names() -> dict[str, str]:
    """The names of cells and their addresses. `machine` is that of addresses without one, a notebook's id its own."""
    return load_yaml(names_file())


def names_file() -> Path:
    """Where the names of cells stand."""
    return paths.root() / "data" / "cells.yaml"


def value(cell: str, reference: Path, names: Mapping[str, str]) -> str:
    """The text of a cell, by its address or its name. Raises `UserError` if it names no row, or several."""
    machine, table, column, *rest = address(cell, names)
    if column.startswith(HEADLINE):
        return headline(reference / machine / table, column.removeprefix(HEADLINE), cell)
    ranged = rest[-1:] == ["range"] and bool(rest.pop())
    form = rest.pop() if rest and rest[-1].startswith(".") else ".2f"
    at = rest.index("over") if "over" in rest else len(rest)
    rows = read_table(reference / machine, table)
    row, others = only_row(rows, column, rest[:at], cell), rest[at + 1 :]
    base = only_value(rows, column, others, cell) if others else 1
    names = [column, f"{column}_low", f"{column}_high"] if ranged else [column]
    if absent := [name for name in names if name not in row]:
        raise unknown(f"cell {cell}: column", absent[0], row.index)
    texts = [format(row[name] / base, form) for name in names]
    return f"{texts[0]} ({texts[1]}–{texts[2]})" if ranged else texts[0]


def address(cell: str, names: Mapping[str, str]) -> list[str]:
    """Machine, table, column and all else of a cell. Raises `UserError` for an unknown name."""
    if " " not in cell and cell not in names:
        raise unknown("cell", cell, names)
    table, *rest = shlex.split(names.get(cell, cell))
    machine, colon, table = table.rpartition(":")
    return [machine if colon else machine_of("/".join(table.split("/")[:2]), names), table, *rest]


def machine_of(notebook: str, names: Mapping[str, str]) -> str:
    """The machine whose results of a notebook pages cite."""
    return names.get(notebook, names["machine"])


def of_these_results(names: Mapping[str, str]) -> dict[str, str]:
    """The names with addresses of the results at hand, no kept ones."""
    return {name: cell for name, cell in names.items() if "/" not in name} | {"machine": "."}


@cache
def read_table(folder: Path, table: str) -> pd.DataFrame:
    """The table of a notebook, its card, a paper's claims, or a file of the machine. Raises `UserError` if none is."""
    notebook, _, kind = table.rpartition("/")
    if kind == CLAIMS:
        return claims(notebook)
    if kind == CARD and (card := read_json(folder / notebook / "meta.json").get("card")):
        return pd.DataFrame(card["bars"].items(), columns=["label", "value"])
    for file in (folder / table / "table.csv", folder / f"{table}.csv"):
        if file.is_file():
            return pd.read_csv(file, low_memory=False)
    raise UserError(f"{folder / table}: nothing is kept there; expected table.csv, or {table}.csv beside it")


def row_of(cell: str, reference: Path, names: Mapping[str, str]) -> pd.Series:
    """The row of a cell's number, without the one it is divided by. Raises `UserError` as `value` does."""
    machine, table, column, *where = address(cell, names)
    where = [word for word in where[: where.index("over") if "over" in where else None] if "=" in word]
    return only_row(read_table(reference / machine, table), column, where, cell)


def only_value(rows: pd.DataFrame, column: str, where: Sequence[str], cell: str) -> object:
    """The value of a column in the only row for which all `key=value` hold. Raises `UserError` otherwise."""
    return only_row(rows, column, where, cell)[column]


def only_row(rows: pd.DataFrame, column: str, where: Sequence[str], cell: str) -> pd.Series:
    """The only row that has a value in a column and for which all `key=value` hold. Raises `UserError` otherwise."""
    for condition in where:
        key, _, wanted = condition.partition("=")
        if key not in rows:
            raise unknown(f"cell {cell}: column", key, rows)
        rows = rows[[_same(known, wanted) for known in rows[key]]]
    if column not in rows:
        raise unknown(f"cell {cell}: column", column, rows)
    rows = rows[rows[column].notna()]
    if len(rows) != 1:
        raise UserError(f"cell {cell}: {len(rows)} rows have a value; expected one: add another key=value")
    return rows.iloc[0]


def headline(folder: Path, kind: str, cell: str) -> str:
    """The sentence that a notebook kept. Raises `UserError` if there is none of that kind."""
    kept = read_json(folder / "meta.json").get("headline") or {}
    if kind not in kept:
        raise unknown(f"cell {cell}: headline", kind, kept)
    return kept[kind]


def _same(known: object, wanted: str) -> bool:
    """Whether a cell of a table is what an address says; numbers are compared as numbers."""
    if isinstance(known, str):
        return known == wanted
    try:
        return float(known) == float(wanted)
    except ValueError:
        return str(known) == wanted


def reference_dir() -> Path:
    """Where kept results are, one folder a machine."""
    return paths.checkout() / "results" / "reference"


def refresh_all(reference: Path) -> None:
    """Refresh the numbers of all pages and print the machines that each page's are from."""
    names = read_names()
    for page in pages():
        machines = sorted({address(cell, names)[0] for cell, _ in citations(page)})
        if machines:
            print(f"{page.name}: {refresh(page, reference)} numbers changed; cited: {', '.join(machines)}")


def main() -> int:
    """Refresh all pages from the kept results."""
    return run_command(lambda: refresh_all(reference_dir()))


if __name__ == "__main__":
    sys.exit(main())

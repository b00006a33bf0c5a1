"""A plan as text and as HTML: a row a way, what its marks mean, and what to do."""

import html
import textwrap
from collections.abc import Callable, Collection
from itertools import chain
from typing import TYPE_CHECKING

import pandas as pd

from toolkit.planner.choices import digits, size_text

if TYPE_CHECKING:
    from toolkit.planner.plan import Recommendation

WIDTH = 100  # columns of text
ROWS = 8  # ways that a plan shows, beside those that it names
SHOWN = ("range", "first", "read", "in DRAM", "limit")
IN_PROCESS = ("range", "first", "read", "needs", "limit")  # of plans within a limit of the process
DISPENSABLE = ("in DRAM", "needs", "first", "range")  # columns that a table leaves out if it is wider
LEGEND = {
    "*": "named below",
    "≤": "at most, by its bytes: no prediction",
    "~": "a guess: the price of {models}",
    "–": "not measured",
}
CELLS: dict[str, Callable] = {
    "range": lambda row: _number(row.low, lambda low: f"{digits(low, 2)}–{digits(row.high, 2)}"),
    "first": lambda row: _number(row.first_s, lambda seconds: f"{digits(seconds, 2)} s"),
    "read": lambda row: size_text(1e6 * row.read_mb) if row.read_mb else "0",
    "in DRAM": lambda row: size_text(1e6 * row.dram_mb),
    "needs": lambda row: size_text(1e6 * row.needs_mb),
    "limit": lambda row: row.limit,
    "device": lambda row: f"{row.device:.0%}",
    "dram": lambda row: f"{row.dram:.0%}",
    "storage": lambda row: f"{row.storage:.0%}",
}


def plan_text(found: "Recommendation", rows: int | None = ROWS) -> str:
    """The table, the ways to take, and the advice; the fastest so many ways and those to take, or all."""
    named = [choice.way for choice in found.choices]
    shown = _fastest(found, rows)
    lines = [_heading(found), plan_table(shown, named, *_columns(found))]
    if len(shown) < len(found.table):
        lines.append(f"{len(found.table) - len(shown)} of {len(found.table)} ways are left out: --all shows them")
    for choice in found.choices:
        lines += ["", wrapped(choice.why), *(f"    {command}" for command in choice.commands)]
    return "\n".join(
        [*lines, "", *map(wrapped, found.advice), *(f"left out: {line}" for line in found.left_out[:rows])]
    )


def plan_html(found: "Recommendation", rows: int | None = ROWS) -> str:
    """The same for a notebook, with the ways that do not fit left out."""
    shown, named = _fastest(found, rows), [choice.way for choice in found.choices]
    cells = _cells(shown, named, _columns(found))
    table = pd.DataFrame({name.strip(): [cell.strip() for cell in column] for name, column in cells.items()})
    parts = [_paragraph(_heading(found)), table.to_html(index=False, border=0), _paragraph(_legend(shown, cells))]
    for choice in found.choices:
        commands = "\n".join(choice.commands)
        parts += [_paragraph(choice.why), f"<pre>{html.escape(commands)}</pre>" if commands else ""]
    return "\n".join([*parts, *map(_paragraph, found.advice)])


def plan_table(table: pd.DataFrame, named: Collection[str], *columns: str) -> str:
    """The text of a table of ways, in the order given, at most `WIDTH` columns wide.

    Args:
        table: of `toolkit.planner.plan` or `best_elsewhere`.
        named: the ways that get a mark.
        columns: of `CELLS`, beside way, speed and price.
    """
    cells = _cells(table, named, columns)
    text = _text(cells)
    for name in DISPENSABLE:
        if text.index("\n") > WIDTH:
            cells.pop(name, None)
            text = _text(cells)
    about = "The fastest way stands first. Price: perplexity over the model's own."
    about += " Read: from the disk, a token. First: until the first token." * ("read" in cells)
    about += " Needs: memory of the process, at least." * ("needs" in cells)
    return "\n".join([wrapped(about), "", text, wrapped(_legend(table, cells))])


def _heading(found: "Recommendation") -> str:
    target = found.target
    size = f"{target.nbytes / 1e9:.2f} GB in {8 * target.dtype_bytes:.0f} bits"
    given = (found.dram_bytes, "of DRAM") if found.memory_bytes is None else (found.memory_bytes, "for the process")
    return f"{target.name}: {size}; {given[0] / 1e9:.2f} GB {given[1]}. Speeds are modelled."


def _columns(found: "Recommendation") -> tuple[str, ...]:
    return SHOWN if found.memory_bytes is None else IN_PROCESS


def _fastest(found: "Recommendation", rows: int | None) -> pd.DataFrame:
    """The first rows, and those of ways that the plan names."""
    table, named = found.table, [choice.way for choice in found.choices]
    return table if rows is None else table[(table.index < rows) | table["way"].isin(named)]


def _cells(table: pd.DataFrame, named: Collection[str], columns: Collection[str]) -> dict[str, list[str]]:
    """The text of each cell, by column."""
    rows = [*table.itertuples()]
    width = max(len(row.way) for row in rows)
    cells = {f"  {'way':{width}}": [f"{'*' if row.way in named else ' '} {row.way:{width}}" for row in rows]}
    cells["tokens/s"] = [f"{'≤ ' if row.at_best else ''}{digits(row.tokens_s)}" for row in rows]
    cells |= {name: [CELLS[name](row) for row in rows] for name in columns}
    cells["price"] = [("~" if row.guess else "") + _number(row.relative, "{:.2f}".format) for row in rows]
    return cells


def _legend(table: pd.DataFrame, cells: dict[str, list[str]]) -> str:
    """The meaning of the marks in these cells."""
    text = "".join(chain(*cells.values()))
    models = ", ".join(sorted({row.quality_of for row in table.itertuples() if row.guess}))
    return "; ".join(f"{mark} {meaning.format(models=models)}" for mark, meaning in LEGEND.items() if mark in text)


def _paragraph(text: str) -> str:
    return f"<p>{html.escape(text)}</p>"


def wrapped(text: str) -> str:
    """A sentence in lines of at most `WIDTH` columns."""
    return textwrap.fill(text, WIDTH, break_on_hyphens=False, break_long_words=False)


def _text(cells: dict[str, list[str]]) -> str:
    """The columns, each as wide as its longest cell, two spaces apart."""
    way, *others = ([name, *column] for name, column in cells.items())
    columns = [way, *([cell.rjust(max(map(len, column))) for cell in column] for column in others)]
    return "\n".join(map("  ".join, zip(*columns, strict=True)))


def _number(value: float, form: Callable[[float], str]) -> str:
    return "–" if value != value else form(value)

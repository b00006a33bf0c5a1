"""The table that `plan` prints: a row a way, and what its marks mean."""

import textwrap
from collections.abc import Callable, Collection

import pandas as pd

from toolkit.planner.choices import digits, size_text

WIDTH = 100  # columns of text
DISPENSABLE = ("in DRAM", "first", "range")  # columns that a table leaves out if it is wider
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
    "limit": lambda row: row.limit,
    "device": lambda row: f"{row.device:.0%}",
    "dram": lambda row: f"{row.dram:.0%}",
    "storage": lambda row: f"{row.storage:.0%}",
}


def plan_table(table: pd.DataFrame, named: Collection[str], *columns: str) -> str:
    """The text of a table of ways, in the order given, at most `WIDTH` columns wide.

    Args:
        table: of `toolkit.planner.plan` or `best_elsewhere`.
        named: the ways that get a mark.
        columns: of `CELLS`, beside way, speed and price.
    """
    rows = [*table.itertuples()]
    width = max(len(row.way) for row in rows)
    cells = {f"  {'way':{width}}": [f"{'*' if row.way in named else ' '} {row.way:{width}}" for row in rows]}
    cells["tokens/s"] = [f"{'≤ ' if row.at_best else ''}{digits(row.tokens_s)}" for row in rows]
    cells |= {name: [CELLS[name](row) for row in rows] for name in columns}
    cells["price"] = [("~" if row.guess else "") + _number(row.relative, "{:.2f}".format) for row in rows]
    text = _text(cells)
    for name in DISPENSABLE:
        if text.index("\n") > WIDTH:
            cells.pop(name, None)
            text = _text(cells)
    about = "The fastest way stands first. Price: perplexity over the model's own."
    about += " Read: from the disk, a token. First: until the first token." * ("read" in cells)
    models = ", ".join(sorted({row.quality_of for row in rows if row.guess}))
    legend = [f"{mark} {meaning.format(models=models)}" for mark, meaning in LEGEND.items() if mark in text]
    return "\n".join([wrapped(about), "", text, wrapped("; ".join(legend))])


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

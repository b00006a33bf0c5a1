"""A grid of parameters: `--grid sparsity=0.3,0.5,0.7 --grid model=a,b` runs a notebook once with every combination."""

import itertools
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from toolkit.errors import UserError, unknown
from toolkit.evidence.catalogue import Notebook
from toolkit.sources import digest

MOST = 1000  # points of a grid; each has a folder, a row and a page of the report
LONGEST = 40  # characters of a value in the name of a folder; of a longer one the end counts
UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")  # for a shell, or for the lists that Snakemake hands to a cluster


@dataclass(frozen=True)
class ParameterGrid:
    """Values to try by parameter, in the order of the command line."""

    values: dict[str, list[object]]

    @property
    def name(self) -> str:
        """Its folder under `results/grid/`: the parameters, sorted."""
        return "+".join(sorted(self.values))

    def __len__(self) -> int:
        """How many points it has."""
        return math.prod(map(len, self.values.values()))

    @cached_property
    def points(self) -> dict[str, dict[str, object]]:
        """Every combination of values by the name of its folder; the first parameter changes last.

        The name depends on the values alone: a point keeps its results when the grid grows or its order changes.
        """
        combinations = itertools.product(*self.values.values())
        points = [dict(zip(self.values, combination, strict=True)) for combination in combinations]
        return {"+".join(f"{name}-{_word(point[name])}" for name in sorted(point)): point for point in points}

    def choose(self, notebooks: Sequence[Notebook], named: Sequence[str]) -> list[Notebook]:
        """The notebooks that have all of these parameters.

        Raises `UserError` if there is none, and for one that the user named by its id and that lacks a parameter.
        """
        lacking = {book.id: [name for name in self.values if name not in book.parameters] for book in notebooks}
        for book in notebooks:
            if book.id in named and lacking[book.id]:
                raise unknown(f"parameter of {book.id}", lacking[book.id][0], book.parameters)
        chosen = [book for book in notebooks if not lacking[book.id]]
        if not chosen:
            known = {name for book in notebooks for name in book.parameters}
            if stray := [name for name in self.values if name not in known]:
                raise unknown("parameter", stray[0], known)
            raise UserError(f"no notebook has all of {', '.join(self.values)}; change fewer of them at once")
        return chosen


def read_grid(items: Sequence[str]) -> ParameterGrid | None:
    """The grid that `--grid NAME=VALUE,VALUE` describe; None for no items.

    Values are JSON with commas between them, or else text between commas. Raises `UserError` for another form, for a
    parameter without values or given twice, and for a value that comes twice.
    """
    values: dict[str, list[object]] = {}
    for item in items:
        name, equals, text = item.partition("=")
        if not (name and equals and text.strip()):
            raise UserError(f"--grid {item}: expected NAME=VALUE,VALUE such as sparsity=0.3,0.5")
        if name in values:
            raise UserError(f"--grid {item}: {name} comes twice; give all its values at once, with commas between them")
        values[name] = read_values(text)
        if "" in values[name]:
            raise UserError(f"--grid {item}: a value is missing beside a comma")
        shown = [json.dumps(value, sort_keys=True) for value in values[name]]
        if twice := [value for value in shown if shown.count(value) > 1]:
            raise UserError(f"--grid {item}: {twice[0]} comes twice; give each value once")
    grid = ParameterGrid(values)
    if len(grid) > MOST:
        raise UserError(f"--grid: {len(grid):,} points; expected at most {MOST:,}: give fewer values")
    return grid if values else None


def read_value(text: str) -> object:
    """A value of a parameter as the command line has it: JSON, and what is not JSON is text."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):  # text, or brackets too deep to be a value
        return text


def read_values(text: str) -> list[object]:
    """`0.3,0.5`, `a,b`, or values with commas of their own: `["a", "b"],["c"]`."""
    together = read_value(f"[{text}]")
    return together if isinstance(together, list) else [read_value(part.strip()) for part in text.split(",")]


def _word(value: object) -> str:
    """A value as a part of a folder's name; one that had to change its characters ends with a digest of its own."""
    text = value if isinstance(value, str) else json.dumps(value, sort_keys=True)
    safe = UNSAFE.sub("-", text[-LONGEST:]).strip("-")
    return safe if safe == text and safe.strip(".") else "-".join(filter(None, (safe, digest(text)[:8])))

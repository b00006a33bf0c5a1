"""The dictionary of columns, `data/columns.yaml`: the unit and the meaning of every column of a notebook's table."""

import re
from dataclasses import dataclass, replace
from functools import cache

from toolkit import paths
from toolkit.records import load_yaml

FILE = "data/columns.yaml"
SECONDS = {"s": 1.0, "ms": 1e-3, "µs": 1e-6, "ns": 1e-9}  # in a unit of time
ENDS = {"gb_s": "GB/s", "_ops_s": "ops/s", "_per_s": "tokens/s", "seconds": "s", "_s": "s", "_ms": "ms", "_us": "µs"}
ENDS |= {"_ns": "ns", "bytes": "bytes", "_kib": "KiB", "mb": "MB", "_gb": "GB", "percent": "percent", "_share": "share"}
OVER = re.compile("(^|_)over_")  # of a ratio
RANGE = {"_low": "lower", "_high": "upper"}


@dataclass(frozen=True)
class Column:
    """One column. `key`: it names rows, and measures nothing; `quantity` and `statistic` are of times alone."""

    unit: str
    meaning: str
    key: bool = False
    quantity: str | None = None
    statistic: str | None = None

    @property
    def names_rows(self) -> bool:
        """Whether it tells rows apart."""
        return self.key or self.unit in ("text", "flag")


@cache
def dictionary() -> dict[tuple[str, str], Column]:
    """Every meaning of a column, by its name and the notebook that alone has it ("": all others).

    Raises `UserError` for a dictionary that cannot be read.
    """
    return {
        (name, id): _column(name, group, said)
        for group, entries in load_yaml(paths.root() / FILE).items()
        for place, said in entries.items()
        for names, _, ids in [place.partition(" in ")]
        for name in names.split(", ")
        for id in ids.split(", ")
    }


def _column(name: str, group: str, said: str | list[str]) -> Column:
    """The column below a heading such as "key count" or "median named"; of a time, its quantity comes first."""
    kind, _, unit = group.rpartition(" ")
    unit = unit_of(name) if unit == "named" else unit
    *quantity, meaning = [said] if isinstance(said, str) else said
    return Column(unit, meaning, kind == "key", *quantity, *([kind] if quantity else []))


def unit_of(name: str) -> str:
    """The unit that a column's name says. Raises `KeyError` for a name that says none."""
    return "ratio" if OVER.search(name) else next(unit for end, unit in ENDS.items() if name.endswith(end))


def column(name: str, notebook: str | None = None) -> Column | None:
    """The meaning of a column, in this notebook if it has one of its own there; None for a column without an entry.

    NAME_low and NAME_high are the ends of the range of NAME, unless they have entries.
    """
    if known := dictionary().get((name, notebook or "")) or dictionary().get((name, "")):
        return known
    ranged, mark, end = name.rpartition("_")
    whole = column(ranged, notebook) if mark + end in RANGE else None
    meaning = f"the {RANGE.get(mark + end)} end of {ranged}: over the turns, or modelled, over what is left open"
    return whole and replace(whole, meaning=meaning, statistic=whole.statistic and end)

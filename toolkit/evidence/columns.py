"""The dictionary of columns, `data/columns.yaml`: the unit and the meaning of every column of a notebook's table."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Literal

from toolkit import paths
from toolkit.records import checked, load_yaml, mapping

FILE = "data/columns.yaml"
SECONDS = {"s": 1.0, "ms": 1e-3, "µs": 1e-6, "ns": 1e-9}  # in a unit of time
UNITS = [
    *("text", "flag", "number", "index", "count", "share", "ratio", "percent", "perplexity", *SECONDS, "tokens"),
    *("tokens/s", "bits", "bytes", "KiB", "MB", "GB", "GB/s", "ops/s", "ops/byte"),
]
STATISTICS = ("median", "mean", "low", "high")

REQUIRED = {"unit": Literal[*UNITS], "meaning": str}
OPTIONAL = {"key": Literal[True], "quantity": str, "statistic": Literal[*STATISTICS]}
ENTRY = mapping("entry", REQUIRED, OPTIONAL | {"in": dict[str, mapping("entry", REQUIRED, OPTIONAL)]})


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
def _entries() -> dict[str, dict]:
    file = paths.root() / FILE
    entries = load_yaml(file)
    checked(entries, dict[str, ENTRY], file)  # type: ignore[valid-type]  # made at run time
    return entries


def column(name: str, notebook: str | None = None) -> Column | None:
    """The meaning of a column, in this notebook if it has one of its own there; None for a column without an entry.

    Raises `UserError` for a dictionary that cannot be read.
    """
    entry = dict(_entries().get(name, {}))
    entry = entry.pop("in", {}).get(notebook, entry)
    return Column(**{key: value for key, value in entry.items() if key != "in"}) if entry else None


def unknown_columns(names: Iterable[str]) -> list[str]:
    """The names that have no entry."""
    return [name for name in names if name not in _entries()]


def dictionary() -> list[dict[str, str]]:
    """A row for each meaning of a column: column, notebook (empty for all), unit, meaning."""
    rows = []
    for name, entry in _entries().items():
        for notebook, one in {"": entry, **entry.get("in", {})}.items():
            rows.append({"column": name, "notebook": notebook, "unit": one["unit"], "meaning": one["meaning"]})
    return rows

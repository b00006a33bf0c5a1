"""The dictionary of columns, `data/columns.yaml`: the unit and the meaning of every column of a notebook's table."""

from dataclasses import dataclass, replace
from functools import cache

from toolkit import paths
from toolkit.records import load_yaml

FILE = "data/columns.yaml"
ENDS = {"low": "lower", "high": "upper"}  # of a range
SECONDS = {"s": 1.0, "ms": 1e-3, "µs": 1e-6, "ns": 1e-9}  # in a unit of time


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
    meanings: dict[tuple[str, str], Column] = {}
    for name, entry in load_yaml(paths.root() / FILE).items():
        ranged = entry.pop("range", False)
        meanings |= {(name, id): Column(**one) for id, one in {"": entry, **entry.pop("in", {})}.items()}
        if ranged:
            meanings |= {(f"{name}_{end}", ""): _end(name, meanings[name, ""], end) for end in ENDS}
    return meanings


def _end(name: str, ranged: Column, end: str) -> Column:
    """The column with one end of a range."""
    meaning = f"the {ENDS[end]} end of {name}: over the turns, or modelled, over what is left open"
    return replace(ranged, meaning=meaning, statistic=ranged.statistic and end)


def column(name: str, notebook: str | None = None) -> Column | None:
    """The meaning of a column, in this notebook if it has one of its own there; None for a column without an entry."""
    return dictionary().get((name, notebook or "")) or dictionary().get((name, ""))

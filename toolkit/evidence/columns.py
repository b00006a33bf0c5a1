"""The dictionary of columns, `data/columns.yaml`: the unit and the meaning of every column of a notebook's table."""

from dataclasses import dataclass
from functools import cache

from toolkit import paths
from toolkit.records import load_yaml

FILE = "data/columns.yaml"
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
    entries = load_yaml(paths.root() / FILE)
    meanings = [
        (name, id, one) for name, entry in entries.items() for id, one in {"": entry, **entry.pop("in", {})}.items()
    ]
    return {(name, id): Column(**one) for name, id, one in meanings}


def column(name: str, notebook: str | None = None) -> Column | None:
    """The meaning of a column, in this notebook if it has one of its own there; None for a column without an entry."""
    return dictionary().get((name, notebook or "")) or dictionary().get((name, ""))

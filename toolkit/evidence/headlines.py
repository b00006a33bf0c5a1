"""Headline numbers of results that are no longer kept: what `results/reference/headlines.csv` holds of them.

    python -m toolkit.evidence.reference epyc-zen4-2c --preset quick --keep corm/tab02   # of the others, these numbers

Columns: machine, notebook, quantity, value, low and high (the range over repetitions), n (repetitions), preset, date.
A notebook leaves the numbers of its card in the report, `caption: label`, and the cells that `data/cells.yaml` names.
The machine leaves the errors of the cost model, where `notebook` is `model_error` or `scores`.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pandas as pd

from toolkit.errors import UserError
from toolkit.evidence.cite import address, value
from toolkit.evidence.meta import read_meta
from toolkit.evidence.tables import ALL

COLUMNS = ("machine", "notebook", "quantity", "value", "low", "high", "n", "preset", "date")
COUNTS = ("repetitions", "turns")  # parameters that say how often a notebook measures
UNITS = (1.0, 1e3, 1e6)  # a card may show seconds of a table as milliseconds or microseconds
EXACT = ".17g"


def headlines(folder: Path, id: str, names: Mapping[str, str], preset: str | None) -> pd.DataFrame:
    """The headline numbers of one notebook in a machine's folder.

    `names` are the cells of `data/cells.yaml`. `preset` is the one that the sweep had, which no file says.
    """
    meta, table = read_meta(folder / id), pd.read_csv(folder / id / "table.csv", low_memory=False)
    shared = {
        "machine": folder.name,
        "notebook": id,
        "n": next((meta.parameters[name] for name in COUNTS if name in meta.parameters), None),
        "preset": preset,
        "date": meta.finished and meta.finished[:10],
    }
    card = meta.card or {"bars": {}}
    numbers = {f"{card['caption']}: {label}": bar for label, bar in card["bars"].items()}
    numbers |= dict(_cells(folder, id, names))
    rows = [{"quantity": name, "value": number, **_range(table, number), **shared} for name, number in numbers.items()]
    return pd.DataFrame(rows, columns=list(COLUMNS))


def machine_headlines(folder: Path) -> pd.DataFrame:
    """The errors of the cost model in a machine's `scores.csv` and `model_error.csv`, over all its notebooks."""
    rows = []
    for notebook, key in (("scores", "paper"), ("model_error", "notebook")):
        if not (file := folder / f"{notebook}.csv").is_file():
            continue
        table = pd.read_csv(file).set_index(key)
        wide = table.loc[[ALL]] if notebook == "model_error" else table
        for (name, quantity), number in wide.select_dtypes("number").stack().items():
            rows.append({"notebook": notebook, "quantity": f"{quantity}, {name}", "value": number})
    return pd.DataFrame(rows, columns=list(COLUMNS)).assign(machine=folder.name)


def _cells(folder: Path, id: str, names: Mapping[str, str]) -> Iterator[tuple[str, float]]:
    """The named cells of a notebook that this machine's table has."""
    for name, cell in names.items():
        if "/" in name or " " not in cell or ":" in cell.split()[0] or not address(name, names)[1].startswith(id):
            continue
        words = " ".join(word for word in cell.split() if not word.startswith("."))
        try:
            number = float(value(f"{folder.name}:{words} {EXACT}", folder.parent, names))
        except (UserError, ValueError):  # this machine's table lacks the row
            continue
        yield words.partition(" ")[2], number


def _range(table: pd.DataFrame, number: float) -> dict[str, float]:
    """`low` and `high` of a table's only row that has a number; nothing if no row or several have it."""
    found = []
    for name in table.columns[table.columns.str.endswith("_low")]:
        middle, high = name.removesuffix("_low"), name.removesuffix("low") + "high"
        for unit in UNITS if {middle, high} <= set(table) else ():
            rows = table[np.isclose(table[middle] * unit, number, rtol=1e-9)].dropna(subset=[name, high])
            found += list((rows[[name, high]] * unit).itertuples(index=False, name=None))
    return dict(zip(("low", "high"), found[0], strict=True)) if len(set(found)) == 1 else {}

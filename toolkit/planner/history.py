"""What the planner was off by on this machine so far: each prediction whose way was measured as well.

    record("smollm2-135m", way, dram_bytes, predicted=speed.tokens_s, measured=9.1, disturbed=0.0)
    spread("layers")    # the ratios measured / predicted between which four of five measurements lie

They are kept under the cache, a line a measurement, and give a prediction its range. What an older cost model was off
by says nothing of this one, so each line names the code that predicted.
"""

from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path

import pandas as pd

from toolkit import paths, sources
from toolkit.files import locked, make_folder, replacing
from toolkit.machines.provenance import cpu_name
from toolkit.planner.ways import PlannedWay

FILE = "predictions.csv"
COST_MODEL = ("hits", "rates", "sizes", "speed")  # modules
ABOUT = ["cpu", "cost_model", "model", "kind", "way", "dram_bytes"]
COLUMNS = [*ABOUT, "predicted", "measured", "disturbed", "measured_at"]
ENDS = (0.1, 0.9)  # quantiles of a range
FEWEST = 4  # measurements that make a range


@dataclass(frozen=True)
class Spread:
    """Ratios of measured to predicted tokens a second: a low and a high one, of how many measurements."""

    low: float
    high: float
    measurements: int


def record(
    model: str, way: PlannedWay, dram_bytes: int | None, predicted: float, measured: float, disturbed: float
) -> None:
    """Keep a prediction beside its measurement, both in tokens a second. Those of disturbed turns are left out."""
    if disturbed >= 0.5:
        return
    moment = datetime.now(UTC).isoformat(timespec="seconds")
    numbers = {"dram_bytes": dram_bytes, "predicted": predicted, "measured": measured, "disturbed": disturbed}
    about = {"cpu": cpu_name(), "cost_model": _cost_model(), "model": model, "kind": way.kind, "way": way.name}
    row = about | numbers | {"measured_at": moment}
    file = _file()
    with locked(file.with_suffix(".lock")), replacing(file) as new:
        pd.concat([_table(file), pd.DataFrame([row])], ignore_index=True).to_csv(new, index=False)


def measurements() -> pd.DataFrame:
    """All that is kept of this processor and cost model, with `COLUMNS`; the last of each model, way and memory."""
    table = _table(_file())
    table = table[(table["cpu"] == cpu_name()) & (table["cost_model"] == _cost_model())]
    return table.drop_duplicates(["model", "way", "dram_bytes"], keep="last")


def spread(kind: str) -> Spread | None:
    """Of ways of a kind; None if fewer than `FEWEST` were measured here."""
    table = measurements()
    ratios = (table["measured"] / table["predicted"])[table["kind"] == kind]
    if len(ratios) < FEWEST:
        return None
    low, high = ratios.quantile(list(ENDS))
    return Spread(low, high, len(ratios))


@cache
def _cost_model() -> str:
    """The code that predicts, but for its comments."""
    folder = paths.root() / "toolkit" / "planner"
    return sources.fingerprint(folder / f"{name}.py" for name in COST_MODEL)[:12]


def _file() -> Path:
    return make_folder(paths.cache_dir() / "planner") / FILE


def _table(file: Path) -> pd.DataFrame:
    """The lines so far; none if the file is not there or no such table."""
    try:
        table = pd.read_csv(file)
    except (OSError, ValueError):
        return pd.DataFrame(columns=COLUMNS)
    return table[COLUMNS] if set(COLUMNS) <= set(table) else pd.DataFrame(columns=COLUMNS)

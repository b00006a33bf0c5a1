"""The few numbers that stand for a notebook on the report's index, where a whole figure is too small to read."""

import pandas as pd
from pydantic import BaseModel, ConfigDict

from toolkit.measure.disturbance import starred

MOST_BARS = 9


class Card(BaseModel):
    """Numbers that the index draws as bars.

    `caption` says what they are, with unit and evidence: "ms a layer, measured here". `bars` are values from 0 by
    label, in the order in which they are drawn; the index has room for `MOST_BARS`.
    """

    model_config = ConfigDict(frozen=True, strict=True)

    caption: str
    bars: dict[str, float]


def latency_card(table: pd.DataFrame) -> Card | None:
    """The measured totals of this machine, a bar a way of running; None where the table has fewer than two.

    In a table with several models or maps of layers, the first one's numbers. `table` holds rows of `Timeline.stages()`
    with the column `way`.
    """
    if not {"stage", "evidence", "seconds", "way", "model"} <= set(table):
        return None
    totals = table[table["stage"].eq("total") & table["evidence"].eq("measured")]
    for column in ("model", "mapping"):
        if column in totals and len(totals):
            totals = totals[totals[column].eq(totals[column].iloc[0])]
    totals = totals[totals["way"].notna()].head(MOST_BARS)
    if len(totals) < 2:
        return None
    unit, factor = ("s", 1.0) if totals["seconds"].max() >= 1 else ("ms", 1e3)
    what, model = totals[["op", "model"]].iloc[0]
    labels, shared = _without_shared_start(starred(totals, "way").tolist())
    about = [
        f"{unit} a {what if what in ('layer', 'pass') else 'product'} of {model}",
        "measured",
        *(word for word in shared if word != model),
    ]
    return Card(caption=", ".join(about), bars=dict(zip(labels, (totals["seconds"] * factor).tolist(), strict=True)))


def _without_shared_start(names: list[str]) -> tuple[list[str], list[str]]:
    """The names without the words that all of them begin with, and those words: `storage, dense`, `storage, endor`."""
    words, shared = [name.split(", ") for name in names], []
    while all(len(each) > 1 for each in words) and len({each[0] for each in words}) == 1:
        shared.append(words[0][0])
        words = [each[1:] for each in words]
    return [", ".join(each) for each in words], shared

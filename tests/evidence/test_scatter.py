"""The figure of published numbers against ours, by hand."""

import pandas as pd
import pytest

from toolkit.evidence.comparison import COLUMNS
from toolkit.evidence.scatter import SIZE, panels

ROW = dict.fromkeys(COLUMNS) | {"kind": "prediction", "stand_in": False, "evidence": "modelled", "profile": "paper"}
ROW |= {"quantity": "a time", "conditions": "dense", "unit": "s", "paper": "endor"}


def row(claim, published, ours, null=None, **more):
    ratios = {"ratio": ours / published, "null_ratio": null and null / published}
    return ROW | {"claim": claim, "published": published, "ours": ours, "null": null} | ratios | more


def test_a_mark_a_quantity_with_the_null_model_hollow_beside_it():
    """From 1 to 100: 10 is in the middle of either axis."""
    rows = [row("x-1", 10.0, 10.0, null=1.0), row("x-2", 100.0, 10.0), row("x-3", 9.0, 10.0, same_as="x-2")]
    rows += [
        row("x-4", 1.0, 1.0, stand_in=True),
        row("x-5", 1.0, 1.0, kind="input"),
        row("x-6", 8.0, 8.0, paper="flash"),
    ]
    found = panels(pd.DataFrame(rows))
    assert found.keys() == {"endor", "flash"}
    marks = [(mark.x, mark.y, mark.null) for mark in found["endor"].marks]
    assert marks == [(150, SIZE, True), (150, 150, False), (SIZE, 150, False)]
    assert found["endor"].ticks == ((0, "1"), (150, "10"), (SIZE, "100"))
    assert found["endor"].marks[1].words == "a time: dense: published 10 s, ours 10"
    assert found["endor"].band == pytest.approx(150 * 0.0414, abs=0.05)


def test_without_predictions_there_is_no_panel():
    assert panels(pd.DataFrame([row("x-1", 1.0, 1.0, kind="context")])) == {}
    assert panels(pd.DataFrame(columns=[*COLUMNS, "paper"])) == {}

import numpy as np
import pandas as pd
import pytest

from toolkit.errors import UserError
from toolkit.evidence.limits import draw, speed_figure

ROWS = [  # limit, way, other software, tokens/s, relative
    (600, "as it is", False, 3.0, 1.0),
    (600, "spqr", False, 4.0, 1.06),
    (600, "endor", False, 2.0, 1.4),
    (600, "llama.cpp", True, 1.2, 1.0),
    (1000, "as it is", False, 6.0, 1.0),
    (1000, "llama.cpp", True, float("nan"), 1.0),  # killed
]
TABLE = pd.DataFrame(ROWS, columns=["limit_mb", "way", "rival", "tokens_per_s", "relative"])


def points(axes):
    """The places of marks, but not those of lines."""
    marks = [line for line in axes.lines if line.get_marker() not in ("", "None") and line.get_linestyle() == "None"]
    return sorted(tuple(map(float, point)) for line in marks for point in line.get_xydata())


def test_a_panel_a_limit_has_a_mark_for_each_way_that_ran():
    left, right = speed_figure(TABLE).axes
    assert (left.get_title(loc="left"), right.get_title(loc="left")) == ("within 600 MB", "within 1 GB")
    assert points(left) == [(1.0, 1.2), (1.0, 3.0), (1.06, 4.0), (1.4, 2.0)]
    assert points(right) == [(1.0, 6.0)]
    front = next(line for line in left.lines if line.get_linewidth() == 4)
    assert front.get_xydata().tolist() == [[1.0, 3.0], [1.06, 4.0]]  # no other way is as fast and as near
    assert sorted(label.get_text() for label in left.texts) == ["1.2", "4"]  # the fastest of either side


def test_predictions_and_prices_that_nobody_knows():
    table = TABLE.assign(predicted_per_s=TABLE["tokens_per_s"] * 2, at_best=TABLE["rival"])
    table.loc[2, "relative"] = np.nan
    left, _ = speed_figure(table).axes
    assert (1.06, 8.0) in points(left)  # predicted
    assert (1.0, 2.4) not in points(left)  # a limit by bytes is none
    assert [label.get_text() for label in left.get_xticklabels()][-1] == "not\nknown"
    beyond = [x for x, y in points(left) if y == 2.0]
    assert min(beyond) > 1.3


def test_a_single_limit_is_drawn_and_none_is_refused(tmp_path):
    draw(TABLE[TABLE["limit_mb"] == 600], tmp_path / "speed.svg")
    assert b"<svg" in (tmp_path / "speed.svg").read_bytes()
    with pytest.raises(UserError, match="no way has a speed"):
        speed_figure(TABLE[TABLE["tokens_per_s"].isna()])

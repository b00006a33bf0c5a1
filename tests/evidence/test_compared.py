import pandas as pd
import pytest

from toolkit.errors import UserError
from toolkit.evidence.compared import COLUMNS, LINE, draw, main

ROWS = [
    ("dense", 10.0, 9.0, 11.0, 47.6, "a model", "140MB"),
    ("endor", 10.1, 9.5, 10.5, 47.6, "a model", "140MB"),
    ("llama.cpp Q4_0", 40.0, 39.0, 44.0, 25.0, "a model", "140MB"),
]
TABLE = pd.DataFrame(ROWS, columns=COLUMNS)


def test_every_way_has_a_mark_with_its_range_and_a_label_that_covers_no_other():
    axes = draw(TABLE).axes[0]
    assert axes.get_title(loc="left") or axes.get_title() == "a model, weights within 140MB"
    points = sorted(tuple(point) for marks in axes.containers for point in marks[0].get_xydata())
    assert points == [(25.0, 40.0), (47.6, 10.0), (47.6, 10.1)]
    ends = sorted(tuple(end[:, 1]) for marks in axes.containers for end in marks[2][0].get_segments())
    assert [tuple(map(float, pair)) for pair in ends] == [(9.0, 11.0), (9.5, 10.5), (39.0, 44.0)]
    heights = {label.get_text(): label.xy[1] for label in axes.texts}
    assert heights["endor"] - heights["dense"] == pytest.approx(LINE * 40)


def test_a_table_is_drawn_from_its_file_or_refused_in_a_line(tmp_path, capsys):
    TABLE.to_csv(tmp_path / "table.csv", index=False)
    assert main([str(tmp_path / "table.csv"), str(tmp_path / "picture.png")]) == 0
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
    TABLE.drop(columns="perplexity").to_csv(tmp_path / "table.csv", index=False)
    assert main([str(tmp_path / "table.csv"), str(tmp_path / "picture.png")]) == 2
    assert "no column 'perplexity'" in capsys.readouterr().err
    with pytest.raises(UserError, match="no rows of finite numbers"):
        draw(TABLE[:0])

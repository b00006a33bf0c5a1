"""Grids of parameters: their points, and the tables and the figure made of what the points left."""

import json

import pandas as pd
import pytest

from toolkit.errors import UserError
from toolkit.sweep import state
from toolkit.sweep.grid import ParameterGrid, read_grid
from toolkit.sweep.grid_report import figure, grid_tables, numbers_table, told_steady
from toolkit.sweep.jobs import Job
from toolkit.sweep.state import State

TWO = ParameterGrid({"sparsity": [0.5, 0.25], "method": ["wanda", "magnitude"]})
QUICK = {"cpu": "A CPU", "memory_gb": 8, "finished": "2026-01-02T03:04:05Z", "id": "quickstart"}


def test_values_are_json_or_text_between_commas():
    for text, values in {
        "0.3,0.5": [0.3, 0.5],
        "a, b/c": ["a", "b/c"],
        '"int4, hqq","int8"': ["int4, hqq", "int8"],
        '["a", "b"],["c"]': [["a", "b"], ["c"]],
        "1,a": [1, "a"],
    }.items():
        assert read_grid([f"name={text}"]) == ParameterGrid({"name": values})
    assert read_grid([]) is None
    for items, names in (
        (["name=0.3,"], "a value is missing"),
        (["name=0.5,0.50"], "0.5 comes twice"),
    ):
        with pytest.raises(UserError, match=names):
            read_grid(items)


def test_a_point_keeps_its_folder_whatever_the_order_on_the_command_line():
    assert list(TWO.points) == [
        "method-wanda+sparsity-0.5",
        "method-magnitude+sparsity-0.5",
        "method-wanda+sparsity-0.25",
        "method-magnitude+sparsity-0.25",
    ]
    turned = ParameterGrid({"method": ["magnitude"], "sparsity": [0.25]})
    assert TWO.points["method-magnitude+sparsity-0.25"] == turned.points["method-magnitude+sparsity-0.25"]
    assert TWO.name == turned.name == "method+sparsity"


def test_folders_of_odd_values_are_safe_and_differ():
    """No comma, equals sign, colon, slash or brace: Snakemake and shells read them as something else."""
    odd = ["a/b", "a-b", "a b", "a{b}", "a,b=c:d", "..", "x" * 300, "y" + "x" * 299, ["a", "b"], "ä"]
    names = list(ParameterGrid({"name": odd}).points)
    assert len(set(names)) == len(odd)
    assert all(set(name) <= set("abcdefghijklmnopqrstuvwxyz0123456789+-._") and len(name) < 60 for name in names)


@pytest.fixture
def leave(tmp_path, monkeypatch):
    """`leave(point, bars)` leaves a quickstart's results at a point, and gives its job; without bars it has failed."""
    monkeypatch.setenv("TOOLKIT_RESULTS_DIR", str(tmp_path))

    def write(point, bars=None):
        job = Job(f"{point}/quickstart", "", "", {}, "key", 1, False, point)
        if bars is None:
            State(job.id, "failed", 0.0, 5.0, error="ValueError: on purpose", **state.this_process()).save()
            return job
        job.folder.mkdir(parents=True)
        pd.DataFrame({"perplexity": list(bars.values()), "method": list(bars), "evidence": "measured"}).to_csv(
            job.folder / "table.csv", index=False
        )
        card = {"caption": "perplexity, measured", "bars": bars}
        (job.folder / "meta.json").write_text(json.dumps(QUICK | {"card": card, "parameters": {"model": "tiny"}}))
        (job.folder / "done.json").write_text(json.dumps({"key": "key"}))
        State(job.id, "done", 0.0, 3.0, 10**9, **state.this_process()).save()
        return job

    return write


def test_a_row_a_number_and_a_line_through_numbers_of_the_same_place(leave):
    grid = ParameterGrid({"sparsity": [0.25, 0.5], "method": ["wanda", "magnitude"]})
    numbers = {0.25: (20.0, 22.0), 0.5: (20.0, 44.0)}
    jobs = [
        leave(point, None if values["method"] == "magnitude" else dict(zip(("dense", label), bars, strict=True)))
        for point, values in grid.points.items()
        for bars in [numbers[values["sparsity"]]]
        for label in [f"{values['method']} {values['sparsity']:.0%}"]
    ]
    found = numbers_table(grid, jobs)
    assert found[["grid_sparsity", "grid_method", "label", "value"]].dropna().to_numpy().tolist() == [
        [0.25, "wanda", "dense", 20.0],
        [0.25, "wanda", "wanda 25%", 22.0],
        [0.5, "wanda", "dense", 20.0],
        [0.5, "wanda", "wanda 50%", 44.0],
    ]
    failed = found[found["value"].isna()]
    assert failed["status"].str.startswith("failed").tolist() == [True, True]
    assert set(failed["error"]) == {"ValueError: on purpose"}
    tables = grid_tables(grid, jobs)
    assert set(tables) == {"perplexity", "quickstart"}
    shown = tables["perplexity"][["grid_sparsity", "grid_method", "notebook", "value", "method", "model"]]
    assert shown.to_numpy().tolist() == [
        [0.25, "wanda", "quickstart", 20.0, "dense", "tiny"],
        [0.25, "wanda", "quickstart", 22.0, "wanda 25%", "tiny"],
        [0.5, "wanda", "quickstart", 20.0, "dense", "tiny"],
        [0.5, "wanda", "quickstart", 44.0, "wanda 50%", "tiny"],
    ]
    assert told_steady(found, tables) == {}
    same = told_steady(found.dropna(subset="value").assign(value=1.0), tables)["quickstart"]
    assert same.endswith("columns of its table that vary: perplexity, method")
    drawn = figure(grid, found.dropna(subset="value"))
    (axes,) = drawn.axes
    assert axes.get_title() + axes.get_title(loc="left") == "wanda"  # left if a notebook's style was set before
    lines = [line.get_xydata().tolist() for line in axes.get_lines() if len(line.get_xydata())]
    assert lines == [[[0.25, 20.0], [0.5, 20.0]], [[0.25, 22.0], [0.5, 44.0]]]
    assert [text.get_text() for text in drawn.legends[0].get_texts()] == ["dense", "wanda 25% / wanda 50%"]

"""The files that a run saves, and how they are read again."""

import json
import random

import numpy as np
import pandas as pd
import pytest
import torch
from matplotlib.figure import Figure

from toolkit.errors import UserError
from toolkit.evidence.catalogue import notebooks, read_parameters
from toolkit.evidence.comparison import COLUMNS
from toolkit.evidence.meta import Meta, read_meta
from toolkit.evidence.run import Run, outside_ranges

ID = next(iter(notebooks()))
TABLE = pd.DataFrame({"name": ["a", "b"], "value": [1.5, 2.5]})


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setenv("TOOLKIT_STAGING_DIR", str(tmp_path / "staging"))
    return Run(ID, notebooks()[ID].parameters | {"seed": 3, "other": object()})


def test_everything_is_saved_with_its_circumstances(run):
    figure = Figure()
    figure.subplots().plot([1, 2])
    rows = [("x-1", None, "within tolerance", 1.05), ("x-2", "x-1", "same effect", 1.2), ("x-3", None, "not run", None)]
    comparison = pd.DataFrame(rows, columns=["claim", "same_as", "verdict", "ratio"]).reindex(columns=COLUMNS)
    comparison = comparison.assign(kind="prediction", stand_in=False, evidence="modelled", profile="paper")
    run.evidence(TABLE, "it works.", figures={"curve": figure}, evidence="measured", comparison=comparison)
    folder = run.folder
    names = {file.name for file in folder.iterdir()}
    assert names >= {"table.csv", "comparison.csv", "curve.svg", "curve.png", "meta.json"}
    assert not any(name.startswith(".") for name in names)
    pd.testing.assert_frame_equal(pd.read_csv(folder / "table.csv"), TABLE.assign(evidence="measured"))
    meta = json.loads((folder / "meta.json").read_text())
    assert meta["parameters"] == notebooks()[ID].parameters | {"seed": 3}
    assert meta["verdicts"] == {"prediction": {"same effect": 1, "not run": 1}}
    assert meta["score"] == pytest.approx({"n": 1, "median_error": 0.2, "largest_error": 0.2, "largest": "x-2"})
    assert meta["inputs"].keys() == {"smollm2-135m", "wiki-slice"}
    assert {"git", "git_dirty", "versions", "cpu", "gpu", "threads", "wall_s", "evidence"} <= meta.keys()
    assert meta["disturbed"] == {"rows": 0, "of": 0}
    assert meta["seen"] == "it works."
    assert meta["load"].keys() == {"others_cores", "stolen_cores", "load_average"}


def test_a_figure_of_a_file_of_several_has_its_own_values_in_the_place_of_none():
    notebook = notebooks()["endor/fig12"]
    opened = read_parameters(notebook.path) | {"repetitions": 2}
    assert opened["ops"] is None
    assert Run(notebook.id, opened).parameters == notebook.parameters | {"repetitions": 2}
    assert Run(notebook.id, opened | {"ops": ["k_proj"]}).parameters["ops"] == ["k_proj"]


def test_evidence_compares_saves_and_says_what_was_seen(run, capsys):
    table = pd.DataFrame({"format": ["endor", "zstd"], "ratio": [0.5625, 0.6]})
    table = table.assign(source="opt-66b fc1", dtype="float16", sparsity=0.5)
    sizes = Run("endor/fig04", notebooks()["endor/fig04"].parameters)
    card = "ratios", table.set_index("format")["ratio"]
    verdicts = sizes.evidence(table, "half.", card=card, evidence="measured").set_index(["quantity", "conditions"])
    assert verdicts["verdict"]["size over dense", "9216x36864, float16, 50 %"] == "within tolerance"
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith("arithmetic: 1 within tolerance")
    assert printed[1] == "Seen: half."
    meta = json.loads((sizes.folder / "meta.json").read_text())
    assert meta["card"] == {"caption": "ratios", "bars": {"endor": 0.5625, "zstd": 0.6}}
    assert set(pd.read_csv(sizes.folder / "comparison.csv")["evidence"].dropna()) == {"measured"}


def test_disturbed_rows_are_counted_in_figure_answer_and_meta(run, capsys):
    figure = Figure()
    figure.subplots().plot([1, 2])
    table = TABLE.assign(disturbed=1.0, evidence="measured")
    run.evidence(table, "it is slow.", figures={"curve": figure}, headline={"gain": "Fast.", "system": "endor"})
    words = f"{len(table)} of {len(table)} measured rows were disturbed by other work"
    assert [text.get_text() for text in figure.texts] == [f"*  {words}"]
    assert f"Seen: it is slow. {words}." in capsys.readouterr().out
    meta = json.loads((run.folder / "meta.json").read_text())
    assert meta["disturbed"] == {"rows": len(table), "of": len(table)}
    assert meta["headline"] == {"gain": f"Fast. ({words})", "system": "endor"}


def test_the_seed_seeds_all_three_generators(run):
    first = random.random(), np.random.rand(), torch.rand(1).item()  # noqa: NPY002
    Run(ID, notebooks()[ID].parameters | {"seed": 3})
    assert (random.random(), np.random.rand(), torch.rand(1).item()) == first  # noqa: NPY002


def test_a_run_outside_the_sweep_keeps_its_results_apart_and_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("TOOLKIT_STAGING_DIR", raising=False)
    monkeypatch.setenv("TOOLKIT_RESULTS_DIR", str(tmp_path))
    kept = tmp_path / ID / "table.csv"
    kept.parent.mkdir()
    kept.write_text("of the sweep")
    figure = Figure()
    figure.subplots().plot([1, 2])
    for figures in ({"first": figure}, {}):
        again = Run(ID, notebooks()[ID].parameters)
        again.evidence(TABLE, "it works.", figures=figures, evidence="measured")
        folder = again.folder
        assert folder == tmp_path / "lab" / ID
        assert str(folder) in capsys.readouterr().out
    assert (folder / "meta.json").is_file()
    assert not (folder / "first.png").exists()
    assert kept.read_text() == "of the sweep"


def test_a_figure_that_cannot_be_drawn_leaves_no_half_file(run):
    class Broken(Figure):
        def savefig(self, path, **_):
            path.write_bytes(b"half")
            raise OSError(28, "No space left on device")

    with pytest.raises(UserError, match="no space left"):
        run.evidence(TABLE, "nothing.", figures={"curve": Broken()}, evidence="measured")
    assert not [file for file in run.folder.iterdir() if "curve" in file.name]


def test_tables_that_do_not_say_what_they_are_or_have_values_outside_their_ranges_are_refused(run):
    for table, evidence, words in (
        (TABLE, "guessed", "guessed"),
        (TABLE.assign(evidence=["measured", None]), None, "nan"),
        (TABLE.assign(value_low=2.0, value_high=3.0), "measured", "value lie outside their own ranges"),
    ):
        with pytest.raises(UserError, match=words):
            run.evidence(table, "nothing.", evidence=evidence)
        assert not run.folder.exists()
    for columns, wrong in (
        ({"speedup": 2.0, "speedup_low": 1.0, "speedup_high": 2.0}, []),
        ({"speedup": 2.1, "speedup_low": 1.0, "speedup_high": 2.0}, ["speedup"]),
        ({"speedup": 0.9, "speedup_low": float("nan"), "speedup_high": float("nan")}, []),
        ({"value": 3.0, "low": 4.0, "high": 5.0}, ["value"]),
        ({"density_low": 3.0, "density_high": 2.0}, []),
    ):
        assert outside_ranges(pd.DataFrame([columns])) == wrong


def test_a_file_that_is_damaged_or_foreign_says_nothing(tmp_path):
    for content in ("", "{half", "[]", '{"another": 2}'):
        (tmp_path / "meta.json").write_text(content)
        assert read_meta(tmp_path) == Meta()

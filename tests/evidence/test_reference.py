import json
import shutil

import pandas as pd
import pytest

from tests import naive_score
from toolkit import paths
from toolkit.errors import UserError
from toolkit.evidence import cite, reference, tables
from toolkit.evidence.comparison import COLUMNS
from toolkit.evidence.headlines import headlines
from toolkit.evidence.reference import copy_picture, keep_only, reference_dir, save
from toolkit.evidence.stage_tables import rows_beside_measured

NOTEBOOKS = ("endor/fig06", "flash/tab02", "spqr/fig4_1")
META = {"git": "a" * 40, "git_dirty": False, "cpu": "a CPU, 2 cores", "gpu": None, "finished": "2026-01-02T03:04:05Z"}
CLAIM = dict.fromkeys(COLUMNS) | {"kind": "prediction", "stand_in": False, "evidence": "modelled"}
COMPARED = pd.DataFrame(
    [
        CLAIM | {"claim": "x-1", "published": 2.0, "ours": 1.8, "ratio": 0.9, "verdict": "within tolerance"},
        CLAIM | {"claim": "x-2", "published": 1.0, "ours": 1.3, "ratio": 1.3, "verdict": "differs", "reason": "why"},
        CLAIM | {"claim": "x-3", "published": 3.0, "ours": None, "ratio": None, "verdict": "not run"},
    ]
).assign(profile="paper", null_ratio=[0.8, 1.5, None])
READS = pd.DataFrame(
    [("measured", "naive", 4.0), ("measured", "hybrid", 2.0), ("modelled", "naive", 5.0), ("modelled", "hybrid", 2.2)],
    columns=["evidence", "way", "io_ms"],
)
TABLES = {
    "endor/fig06": pd.DataFrame({"stage": ["read", "decode", "total"], "modelled_over_measured": [1.1, 0.5, 0.9]}),
    "flash/tab02": rows_beside_measured(READS.assign(profile="this-machine"), "io_ms", "way"),
    "spqr/fig4_1": pd.DataFrame({"modelled_over_measured": [0.75], "profile": "this-machine"}),
}


@pytest.fixture
def results(tmp_path, monkeypatch):
    """A results folder with three notebooks; a function that changes what one of them says of itself."""
    monkeypatch.setenv("TOOLKIT_RESULTS_DIR", str(tmp_path / "results"))
    monkeypatch.setattr(reference, "reference_dir", lambda: tmp_path / "reference")

    def write(id: str, **changes: object) -> None:
        folder = paths.results_dir() / id
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "meta.json").write_text(json.dumps(META | {"parameters": {}} | changes))
        TABLES[id].to_csv(folder / "table.csv", index=False)
        if id == "endor/fig06":
            COMPARED.to_csv(folder / "comparison.csv", index=False)

    for id in NOTEBOOKS:
        write(id)
    return write


@pytest.mark.parametrize(
    ("changes", "words"), [({"git_dirty": True}, "changed files"), ({"git": "b" * 40}, "bbbbbbbbbb")]
)
def test_results_of_several_commits_or_changed_files_are_not_kept(results, changes, words):
    results("endor/fig06", **changes)
    with pytest.raises(UserError, match=rf"one commit.*aaaaaaaaaa.*run these again: endor/fig06 \({words}\)$"):
        save("here")
    assert not (reference.reference_dir() / "here").exists()


def test_results_of_one_clean_commit_are_kept_with_their_scores(results):
    folder = save("here")
    assert {file.parent.relative_to(folder).as_posix() for file in folder.rglob("meta.json")} == set(NOTEBOOKS)
    tables.write_scores(folder)
    (row,) = pd.read_csv(folder / "scores.csv").to_dict("records")
    numbers = [row[name] for name in ("n", "median_error", "largest_error", "null_median_error", "null_largest_error")]
    assert (row["paper"], row["largest"]) == ("endor", "x-2")
    assert numbers == pytest.approx([2, 0.2, 0.3, 0.35, 0.5])
    off = pd.read_csv(folder / "model_error.csv").set_index("notebook")
    assert off.loc["endor/fig06"].tolist() == pytest.approx([0.3, 0.1, 0.5, 0.1])
    assert off["stages"]["flash/tab02"] == pytest.approx((0.25 + 0.1) / 2)  # 5 / 4 and 2.2 / 2
    assert off["stages_largest"]["spqr/fig4_1"] == pytest.approx(0.25)  # the larger limit, 1.5, over 2
    assert off["stages_largest"][tables.ALL] == pytest.approx(0.5)


@pytest.mark.parametrize("machine", ["epyc-zen4-2c", "."])
def test_kept_scores_follow_from_the_comparisons_alone(machine, tmp_path):
    """By an oracle that knows nothing but the files; `.` stands for those of all machines together."""
    folder = reference_dir() / machine
    if machine == ".":
        shutil.copytree(folder, tmp_path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.png", "table.csv"))
        for kept in [one for one in tmp_path.iterdir() if one.is_dir()]:
            shutil.copytree(kept, tmp_path / "all", dirs_exist_ok=True)
    for row in pd.read_csv(folder / "scores.csv").to_dict("records"):
        known = naive_score.score(tmp_path / "all" if machine == "." else folder, row["paper"])
        assert row["n"] == known["n"]
        assert f"{row['median_error']:.0%} and {row['largest_error']:.0%}" == known["off"]
        assert (row["null_n"] > 0) == ("null_off" in known)  # Hermes's figures of one machine have no null model
        if "null_off" in known:
            assert f"{row['null_median_error']:.0%} and {row['null_largest_error']:.0%}" == known["null_off"]


def test_kept_model_errors_are_those_of_the_kept_tables():
    folder = reference_dir() / "epyc-zen4-2c"
    pd.testing.assert_frame_equal(tables.model_errors(folder), pd.read_csv(folder / "model_error.csv"))


CARD = {"caption": "ms, measured", "bars": {"dense": 20.0, "packed": 10.0}}
TIMES = pd.DataFrame(
    {
        "stage": "total",
        "way": ["dense", "packed"],
        "seconds": [0.020, 0.010],
        "seconds_low": [0.019, 0.009],
        "seconds_high": [0.025, 0.012],
        "speedup": [1.0, 2.0],
    }
)


@pytest.fixture
def kept(results):
    """Two notebooks of a machine are kept; one has a card, a named cell and a range."""
    results("endor/fig06", card=CARD, parameters={"repetitions": 5})
    TIMES.to_csv(paths.results_dir() / "endor" / "fig06" / "table.csv", index=False)
    folder = save("here")
    tables.write_scores(folder)
    return folder


def test_pages_cite_another_machine_from_now_on(kept, tmp_path, monkeypatch):
    with pytest.raises(UserError, match=r"flash/tab03: no results in .*--only flash/tab03"):
        save("there", ["endor/fig06", "flash/tab03"])
    save("there", ["endor/fig06"])
    cells, page = tmp_path / "cells.yaml", tmp_path / "README.md"
    cells.write_text("machine: here\nflash/tab02: there\n\nname: endor/fig06 seconds way=dense\n")
    page.write_text("![a](results/reference/here/endor/fig06/a.png) ![b](results/reference/here/flash/tab02/b.png)\n")
    monkeypatch.setattr(cite, "names_file", lambda: cells)
    monkeypatch.setattr(cite, "pages", lambda: [page])
    for _ in range(2):  # again changes nothing
        reference.cite_from_now("there", ["endor/fig06", "flash/tab02"])
        assert cells.read_text().splitlines()[:3] == ["machine: here", "endor/fig06: there", "flash/tab02: there"]
        assert page.read_text().count("reference/there/endor/fig06/a.png") == 1
        assert page.read_text().count("reference/here/flash/tab02/b.png") == 1
        assert sorted(meta.parent.name for meta in kept.glob("*/*/meta.json")) == ["fig4_1", "tab02"]
    assert (kept.parent / "there" / "endor" / "fig06" / "table.csv").is_file()


def test_headline_numbers_of_a_notebook_by_hand(kept):
    names = {
        "machine": "elsewhere",
        "packed-speed": "endor/fig06 speedup way=packed .1f",
        "not-here": "endor/fig06 x y=1",
    }
    found = headlines(kept, "endor/fig06", names, "quick").set_index("quantity")
    assert found.index.tolist() == ["ms, measured: dense", "ms, measured: packed", "speedup way=packed"]
    assert found.loc["ms, measured: packed", ["value", "low", "high"]].tolist() == pytest.approx([10, 9, 12])
    assert found.loc["speedup way=packed", "value"] == 2
    assert set(map(tuple, found[["machine", "notebook", "n", "preset", "date"]].to_numpy())) == {
        ("here", "endor/fig06", 5, "quick", "2026-01-02")
    }


def test_what_is_not_kept_leaves_its_headline_numbers(kept):
    with pytest.raises(UserError, match="endor/fig99: nothing is kept of it"):
        keep_only("here", ["endor/fig99"])
    for _ in range(2):  # again changes nothing
        keep_only("here", ["flash/tab02"], "quick")
        numbers = pd.read_csv(reference.reference_dir() / "headlines.csv").set_index(["notebook", "quantity"])["value"]
        assert numbers["endor/fig06", "ms, measured: dense"] == 20
        assert numbers["scores", "n, endor"] == 2
        assert numbers["model_error", "stages_largest, all together"] > 0
        assert [meta.parent.name for meta in kept.glob("*/*/meta.json")] == ["tab02"]
        assert list(kept.glob("*.csv")) == []  # scores of all that was there
    keep_only("here", [])
    assert not list(kept.iterdir())


def test_a_kept_picture_has_the_same_pixels_in_fewer_bytes(tmp_path):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    figure, axes = pyplot.subplots()
    axes.plot([0, 1, 0])
    figure.savefig(tmp_path / "large.png")
    copy_picture(tmp_path / "large.png", tmp_path / "small.png")
    one, other = (pyplot.imread(tmp_path / name)[..., :3] for name in ("large.png", "small.png"))
    assert abs(one - other).max() < 0.05
    assert (tmp_path / "small.png").stat().st_size < 0.7 * (tmp_path / "large.png").stat().st_size

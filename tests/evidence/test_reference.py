import json

import pandas as pd
import pytest

from tests import naive_score
from toolkit import paths
from toolkit.errors import UserError
from toolkit.evidence import reference, tables
from toolkit.evidence.comparison import COLUMNS
from toolkit.evidence.reference import reference_dir, save

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
    "flash/tab02": READS.assign(profile="this-machine"),
    "spqr/fig4_1": pd.DataFrame({"seconds": [2.0], "bytes_s": [1.0], "instructions_s": [1.5]}).assign(
        profile="this-machine"
    ),
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


@pytest.mark.parametrize("file", sorted(reference_dir().glob("*/scores.csv")), ids=lambda file: file.parent.name)
def test_kept_scores_follow_from_the_comparisons_alone(file):
    """By an oracle that knows nothing but the files."""
    for row in pd.read_csv(file).to_dict("records"):
        known = naive_score.score(file.parent, row["paper"])
        assert row["n"] == known["n"]
        assert f"{row['median_error']:.0%} and {row['largest_error']:.0%}" == known["off"]
        assert (row["null_n"] > 0) == ("null_off" in known)  # Hermes's figures of one machine have no null model
        if "null_off" in known:
            assert f"{row['null_median_error']:.0%} and {row['null_largest_error']:.0%}" == known["null_off"]


def test_kept_model_errors_are_those_of_the_kept_tables():
    folder = reference_dir() / "epyc-zen4-2c"
    pd.testing.assert_frame_equal(tables.model_errors(folder), pd.read_csv(folder / "model_error.csv"))

import json

import pandas as pd
import pytest

from toolkit import paths
from toolkit.errors import UserError
from toolkit.evidence import reference
from toolkit.evidence.reference import BEGIN, END, readme_tables, reference_dir, save

NOTEBOOKS = ("endor/fig04", "endor/fig06", "endor/tab_e2e", "endor/tab_perplexity")
META = {"git": "a" * 40, "git_dirty": False, "cpu": "a CPU, 2 cores", "gpu": None, "finished": "2026-01-02T03:04:05Z"}
PARAMETERS = {
    "model": "tiny",
    "corpus": "words",
    "evaluation_windows": 4,
    "calibration_windows": 4,
    "sequence_length": 64,
    "task_limit": None,
    "twin_rows": 64,
    "measured_layers": 2,
    "measured_model": "opt-125m",
}
CLAIM = {
    "kind": "prediction",
    "same_as": None,
    "bound": None,
    "stand_in": False,
    "evidence": "modelled",
    "reason": None,
}
COMPARED = pd.DataFrame(
    [
        CLAIM | {"claim": "x-1", "published": 2.0, "ours": 1.8, "ratio": 0.9, "verdict": "within tolerance"},
        CLAIM | {"claim": "x-2", "published": 1.0, "ours": 1.3, "ratio": 1.3, "verdict": "differs", "reason": "why"},
        CLAIM | {"claim": "x-3", "published": 3.0, "ours": None, "ratio": None, "verdict": "not run"},
    ]
).assign(profile="paper", null_ratio=[0.8, 1.5, None])
PASSES = pd.DataFrame(
    [("dense", "pipelined", 2.0), ("endor", "pipelined", 1.0)], columns=["method", "policy", "seconds"]
).assign(stage="total", evidence="measured", mapping="storage", device="gpu", modelled_over_measured=None)
SIZES = pd.DataFrame([("endor", "float16", 0.56)], columns=["format", "dtype", "ratio"])
QUALITY = pd.DataFrame(
    [("none", "dense", "perplexity", 9.0, 0.5)], columns=["pattern", "method", "metric", "value", "standard_error"]
)
ERRORS = pd.DataFrame({"stage": ["read", "decode", "total"], "modelled_over_measured": [1.1, 0.5, 0.9]})
TABLES = {
    "endor/fig04": SIZES.assign(source="opt-66b fc1", sparsity=0.5, evidence="measured"),
    "endor/fig06": ERRORS,
    "endor/tab_e2e": PASSES,
    "endor/tab_perplexity": QUALITY,
}


@pytest.fixture
def results(tmp_path, monkeypatch):
    """A results folder with four notebooks; a function that changes what one of them says of itself."""
    monkeypatch.setenv("TOOLKIT_RESULTS_DIR", str(tmp_path / "results"))
    monkeypatch.setattr(reference, "reference_dir", lambda: tmp_path / "reference")

    def write(id: str, **changes: object) -> None:
        folder = paths.results_dir() / id
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "meta.json").write_text(json.dumps(META | {"parameters": PARAMETERS} | changes))
        TABLES[id].to_csv(folder / "table.csv", index=False)
        if id == "endor/fig06":
            COMPARED.to_csv(folder / "comparison.csv", index=False)

    for id in NOTEBOOKS:
        write(id)
    return write


def test_readmes_tables_are_those_of_kept_results():
    folders = [folder for folder in reference_dir().iterdir() if folder.is_dir()]
    metas = [json.loads(file.read_text()) for folder in folders for file in folder.rglob("meta.json")]
    if any(meta["schema"] != paths.RESULTS_SCHEMA for meta in metas):
        pytest.skip("the kept results are of an older schema: run all notebooks and keep their results")
    text = (paths.root() / "README.md").read_text(encoding="utf-8")
    shown = text.split(BEGIN)[1].split(END)[0].strip()
    assert shown in [readme_tables(folder) for folder in folders]


@pytest.mark.parametrize(
    ("changes", "words"), [({"git_dirty": True}, "changed files"), ({"git": "b" * 40}, "bbbbbbbbbb")]
)
def test_results_of_several_commits_or_changed_files_are_not_kept(results, changes, words):
    results("endor/fig06", **changes)
    with pytest.raises(UserError, match=rf"one commit.*aaaaaaaaaa.*run these again: endor/fig06 \({words}\)$"):
        save("here")
    assert not (reference.reference_dir() / "here").exists()


def test_results_of_one_clean_commit_are_kept(results):
    folder = save("here")
    assert {file.parent.relative_to(folder).as_posix() for file in folder.rglob("meta.json")} == set(NOTEBOOKS)


def test_readme_shows_predictions_beside_the_null_model_and_what_differs(results, monkeypatch, tmp_path):
    folder = save("here")
    monkeypatch.setattr(paths, "root", lambda: tmp_path)
    monkeypatch.setattr(reference, "notebooks", lambda: dict.fromkeys(NOTEBOOKS))
    text = readme_tables(folder)
    assert text.startswith("Measured on a CPU, 2 cores, no GPU, 2026-01-02; all of it in `reference/here/`.")
    assert "`endor`: 2 predictions, off by 20% (median) and 30% (at most, x-2), where bytes over links" in text
    assert "nothing else are off by 35% and 50%." in text
    assert "| prediction | on the paper's machine, modelled | 1 | 0 | 0 | 1 |" in text
    assert "* `endor/x-2`: 1 published, 1.3 modelled, paper: why." in text
    assert "run on the GPU; measured" in text
    assert "(36864 × 9216), measured;" in text
    assert "| endor/fig06 | 30% | 10% | 50% | 10% |" in text
    assert "numbers met" not in text


def test_the_gpu_is_named_where_there_is_one(results, monkeypatch, tmp_path):
    results("endor/tab_perplexity", gpu="a GPU")
    folder = save("here")
    monkeypatch.setattr(paths, "root", lambda: tmp_path)
    monkeypatch.setattr(reference, "notebooks", lambda: dict.fromkeys(NOTEBOOKS))
    assert readme_tables(folder).startswith("Measured on a CPU, 2 cores, a GPU, 2026-01-02")

import json
import re

import pandas as pd
import pytest

from tests import naive_score
from toolkit import paths
from toolkit.errors import UserError
from toolkit.evidence import readme, reference
from toolkit.evidence.comparison import COLUMNS
from toolkit.evidence.literature import PAPERS
from toolkit.evidence.readme import (
    BLOCKS,
    GROUP_WORDS,
    read_block,
    readme_papers,
    readme_summary,
    readme_tables,
    write_readme,
)
from toolkit.evidence.reference import reference_dir, save

NOTEBOOKS = ("endor/fig04", "endor/fig06", "endor/tab_e2e", "endor/tab_perplexity", "flash/tab02")
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
    "rival_layers": 1,
    "rival_model": "toy-llama",
}
CLAIM = dict.fromkeys(COLUMNS) | {
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
STAND_IN = COMPARED.iloc[:1].assign(claim="x-4", stand_in=True, verdict="same sign")
COMPARED = pd.concat([COMPARED, STAND_IN], ignore_index=True)
READS = pd.DataFrame(
    [("measured", "naive", 4.0), ("measured", "hybrid", 2.0), ("modelled", "naive", 5.0), ("modelled", "hybrid", 2.2)],
    columns=["evidence", "way", "io_ms"],
).assign(profile="this-machine")
PASSES = pd.DataFrame(
    [
        ("opt-125m", "storage", "dense", "pipelined", 2.0, 100),
        ("opt-125m", "storage", "endor", "pipelined", 1.5, 60),
        ("opt-125m", "storage", "endor_packed", "pipelined", 1.0, 60),
        ("opt-125m", "published", "endor", "sequential", 1.5, 60),
        ("toy-llama", "storage", "dense", "pipelined", 4.0, 100),
        ("toy-llama", "storage", "endor", "pipelined", 2.0, 50),
        ("toy-llama", "storage", "another program", "sequential", 5.0, 100),
    ],
    columns=["model", "mapping", "method", "policy", "seconds", "stored_bytes"],
).assign(stage="total", evidence="measured", device="gpu", modelled_over_measured=None, dram_layers=1, speedup=1.25)
PASSES["mode"] = PASSES["method"].map({"another program": "mmap"}).fillna("direct")
PASSES = PASSES.assign(low_s=PASSES["seconds"] - 0.25, high_s=PASSES["seconds"] + 0.25)
SIZES = pd.DataFrame(
    [("opt-66b fc1", "", 0.56), ("tiny", "50 %", 0.57), ("tiny", "2:4", 0.58)], columns=["source", "pattern", "ratio"]
)
QUALITY = pd.DataFrame(
    [
        ("none", "dense", "perplexity", 9.0, 0.5, 16.0, None),
        ("none", "int8", "perplexity", 9.5, 0.5, 8.0, None),
        ("50 %", "wanda", "perplexity", 12.0, 0.5, 9.0, None),
        ("50 %", "magnitude", "perplexity", 30.0, 0.5, 9.0, None),
        ("none", "dense", "task", 0.75, 0.01, 16.0, 0.5),
        ("none", "wanda", "task, by calibration", 0.7, 0.01, 9.0, 0.5),
        ("none", "wanda - sparsegpt", "difference of log-perplexity", 0.1, 0.01, None, None),
    ],
    columns=["pattern", "method", "metric", "value", "standard_error", "bits_per_weight", "chance"],
)
ERRORS = pd.DataFrame({"stage": ["read", "decode", "total"], "modelled_over_measured": [1.1, 0.5, 0.9]})
TABLES = {
    "endor/fig04": SIZES.assign(format="endor", dtype="float16", sparsity=0.5, evidence="measured"),
    "endor/fig06": ERRORS,
    "endor/tab_e2e": PASSES,
    "endor/tab_perplexity": QUALITY,
    "flash/tab02": READS,
}


@pytest.fixture
def results(tmp_path, monkeypatch):
    """A results folder with five notebooks; a function that changes what one of them says of itself."""
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


@pytest.mark.parametrize("name", BLOCKS)
def test_readmes_blocks_are_made_from_kept_results(name):
    folders = [folder for folder in reference_dir().iterdir() if folder.is_dir()]
    metas = [json.loads(file.read_text()) for folder in folders for file in folder.rglob("meta.json")]
    if any(meta["schema"] != paths.RESULTS_SCHEMA for meta in metas):
        pytest.skip("the kept results are of an older schema: run all notebooks and keep their results")
    place, write = BLOCKS[name]
    text = (paths.root() / place).read_text(encoding="utf-8")
    assert read_block(text, name) in [write(folder) for folder in folders]


def score_words(found: dict[str, object]) -> list[str]:
    """What the kept results' README must say of a paper, from the oracle's numbers."""
    left_out = f"left out: {found['limits']} limits, {found['stand_ins']} stand-ins, "
    words = [left_out + f"{found['not_run']} of {found['quantities']} quantities not run"]
    for key, pattern in {
        "off": f"{found['n']} prediction.*, off by {{}} \\(median\\) and {{}} \\(at most, ",
        "null_off": "nothing else are off by {} and {}",
    }.items():
        if key in found:
            words.append(pattern.format(*found[key].split(" and ")))
    if found.get("null_n", found["n"]) < found["n"]:
        words.append(f"on the {found['null_n']} that they reach \\(ours there: {found['same_off']}\\)")
    return words


def score_cells(found: dict[str, object]) -> str:
    """The first cells of README's row of a paper, from the oracle's numbers."""
    off, null = (found.get(key, "–").replace(" and ", ", ") for key in ("off", "null_off"))
    count = f" (on {found['null_n']})" if found.get("null_n", found["n"]) < found["n"] else ""
    return f" | {found['n']} | {off} | {null}{count} | "


@pytest.mark.parametrize("paper", ["endor", "flash", "spqr", "hermes", "corm"])
def test_readmes_scores_follow_from_the_comparisons_alone(paper):
    """Of the machine that the blocks are made of, by an oracle that knows nothing but the files."""
    rows = [
        line
        for name, start in (("papers", f"| {PAPERS[paper].name} |"), ("results", f"* `{paper}`: "))
        for line in read_block((paths.root() / BLOCKS[name][0]).read_text(encoding="utf-8"), name).splitlines()
        if line.startswith(start)
    ]
    folders = [folder for folder in reference_dir().iterdir() if (folder / paper).is_dir()]
    found = [naive_score.score(folder, paper) for folder in folders]
    brief, full = rows
    assert any(score_cells(each) in brief for each in found), (brief, found)
    assert any(all(re.search(words, full) for words in score_words(each)) for each in found), (full, found)


def test_readme_is_short():
    assert len((paths.root() / "README.md").read_text(encoding="utf-8").splitlines()) <= 130


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
    results("endor/fig04", headline={"gain": "More.", "cost": "Less."})
    results("endor/fig06", headline={"system": "flash", "cost": "First."})
    results("endor/tab_e2e", headline={"system": "flash", "cost": "Second.", "negative": "Never."})
    folder = save("here")
    monkeypatch.setattr(paths, "root", lambda: tmp_path)
    monkeypatch.setattr(readme, "notebooks", lambda: dict.fromkeys(NOTEBOOKS))
    text = readme_tables(folder)
    assert text.startswith("Measured on a CPU, 2 cores, no GPU, 2026-01-02; all of it in `here/`.")
    assert "* `endor`: 2 predictions, off by 20% (median) and 30% (at most, " in text
    assert "* `endor`, gain: More.\n* `endor`, cost: Less.\n* `flash`, cost: First.\n* `flash`, cost: Second.\n" in text
    brief = readme_papers(folder)
    assert "| ENDOR | 2 | 20%, 30% | 35%, 50% | More. | Less. |" in brief
    assert "| LLM in a flash | – | – | – | – | First. Never. |" in brief
    assert "nothing else are off by 35% and 50%; left out: 0 limits, 1 stand-ins, 1 of 4 quantities not run." in text
    values, stand_ins = (text.split(GROUP_WORDS[name])[1].strip().splitlines()[2] for name in ("values", "stand-ins"))
    assert (values, stand_ins) == ("| prediction | 1 | 0 | 0 | 1 |", "| prediction | 0 | 0 | 1 | 0 |")
    assert "(`endor/x-2`): 1 published, 1.3 modelled, paper: why." in text
    assert "run on the GPU; measured" in text
    assert "(36864 × 9216), measured." in text
    assert "| format | opt-66b fc1, float16 | tiny, float16 |\n| --- | --- | --- |\n| endor | 56.0% | 57.0% |" in text
    assert "| pattern | method | bits | perplexity | task (chance 50%) |" in text
    assert "| none | dense | 16.00 | 9.0 ± 0.5 | 75.0% ± 1.0% |" in text
    assert "by calibration" not in text
    assert "| endor_packed | pipelined | 1.000 | 0.750 | 1.250 | 2.00 | 1.67 |" in text
    assert "| published | 1 | endor | sequential | 1.500 | 1.250 | 1.750 | 1.25 |" in text
    assert "| another program | sequential | 5.000 | 4.750 | 5.250 | 0.80 | – |" in text
    assert "| endor/fig06 | 30% | 10% | 50% | 10% |" in text
    assert "| flash/tab02 | 18% | – | 25% | – |" in text  # 5 / 4 and 2.2 / 2
    assert "numbers met" not in text


def test_the_gpu_is_named_where_there_is_one(results, monkeypatch, tmp_path):
    results("endor/tab_perplexity", gpu="a GPU")
    folder = save("here")
    monkeypatch.setattr(paths, "root", lambda: tmp_path)
    monkeypatch.setattr(readme, "notebooks", lambda: dict.fromkeys(NOTEBOOKS))
    assert readme_tables(folder).startswith("Measured on a CPU, 2 cores, a GPU, 2026-01-02")


def test_the_summary_says_what_is_gained_what_it_costs_and_what_a_user_would_take_instead(results):
    text = readme_summary(save("here"))
    assert "through 2 layers of `opt-125m`, of random weights, comes from disk **2.00 times as fast**" in text
    assert "(its bytes allow 1.67; the rest lies within the turns' spread)" in text  # 1.75 / 1.25 is 1.40
    assert "perplexity grows from 9.0 to 12.0 at 9.0 bits a weight (`tiny`, wanda)" in text
    assert "keep a perplexity of 9.5 at 8.0 bits (int8)." in text
    assert "other programs run at these multiples of Endor's speed: another program 0.40." in text


def test_the_summary_names_the_range_over_kept_machines(results):
    save("slower")
    slower = reference.reference_dir() / "slower" / "endor" / "tab_e2e" / "table.csv"
    table = pd.read_csv(slower)
    table["seconds"] *= table["method"].eq("dense").map({True: 0.5, False: 1.0})
    table.to_csv(slower, index=False)
    other = save("other-model") / "endor" / "tab_e2e" / "meta.json"
    other.write_text(other.read_text().replace('"opt-125m"', '"opt-350m"'))
    folder = save("here")
    race = [("tiny", "dram", "spqr", 0.9), ("tiny", "dram", "spqr_ptcsr", 1.1), ("tiny", "storage", "spqr", 3.0)]
    for machine, factor in (("here", 1), ("slower", 0.5)):
        place = reference.reference_dir() / machine / "spqr" / "fig4_3"
        place.mkdir(parents=True)
        (place / "meta.json").write_text("{}")
        rows = pd.DataFrame(race, columns=["model", "place", "method", "over_rival"])
        rows.assign(over_rival=rows["over_rival"] * factor).to_csv(place / "table.csv", index=False)
    text = readme_summary(folder)
    assert "over 2 kept machines from 1.00 on `slower` to 2.00 on `here`" in text
    words = "1.10 times as fast through `tiny`'s layers; over 2 kept machines from 0.55 on `slower` to 1.10 on `here`."
    assert f"SpQR's tokens against llama.cpp's Q3_K: {words}" in text


def test_only_the_text_between_the_markers_is_replaced(results, monkeypatch, tmp_path):
    folder = save("here")
    monkeypatch.setattr(paths, "root", lambda: tmp_path)
    monkeypatch.setattr(readme, "notebooks", lambda: dict.fromkeys(NOTEBOOKS))
    blocks = "\n".join(f"{readme.BEGIN.format(name)}\n-\n{readme.END.format(name)}\nafter - {name}" for name in BLOCKS)
    for place in {place for place, _ in BLOCKS.values()}:
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / place).write_text(f"before - all\n{blocks}\n")
    write_readme(folder)
    for name, (place, write) in BLOCKS.items():
        text = (tmp_path / place).read_text()
        assert text.startswith("before - all\n")
        assert f"\nafter - {name}\n" in text
        assert read_block(text, name) == write(folder)
    (tmp_path / "README.md").write_text("no markers")
    with pytest.raises(UserError, match="the lines '<!-- begin generated summary"):
        write_readme(folder)

"""The engine's promises, tried on toy notebooks: what reruns, what survives a failure or a kill, what is refused."""

import shutil
import signal
import subprocess
import time
import zipfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pandas as pd
import psutil
import pytest

from tests.sweep.conftest import make_checkout
from toolkit import paths
from toolkit.sweep.__main__ import main

ODD = 'it\'s a {b} {} {{c}} #d & "e" $HOME %s ünï [f] *?;'
KILL_JOB = """
import psutil
for process in psutil.process_iter(["cmdline"]):
    if {"toolkit.sweep.execute", "toy/c"} <= set(process.info["cmdline"] or ()):
        process.kill()
"""  # as the kernel's out-of-memory killer does it


@dataclass(frozen=True)
class Step:
    """A sweep that has ended: its status, what it printed, the notebooks that it executed, a copy of what it left."""

    status: int
    printed: str
    executed: list[str]
    results: Path

    def table(self, id: str) -> list[int]:
        """The numbers that a notebook saved."""
        return pd.read_csv(self.results / id / "table.csv")["value"].tolist()

    def page(self, name: str) -> str:
        """A page of the report."""
        return (self.results / "report" / f"{name}.html").read_text()


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    """A checkout of four notebooks for all steps below, in a folder with an odd name, with results in another one.

    Nothing in a path is taken for a pattern, a comment or a word of a shell. There is no colon in the checkout's own
    path, since the tests put that on PYTHONPATH.
    """
    folder = tmp_path_factory.mktemp("toy")
    toy = make_checkout(folder / ODD, folder / f"a: {ODD}")
    body = "from toolkit import progress as bars\n"
    body += "import os\nos.environ.pop(bars.SWITCH)\nbars.DELAY_S = bars.ELSEWHERE_S = 0\n"
    body += "with bars.progress('toy work', 2, 'steps') as bar:\n    [bar.update() for _ in range(2)]\n"
    body += "import time\ntime.sleep(600 * (value == 2))\n"
    body += "(run.folder / 'more').mkdir(parents=True)\n(run.folder / 'more' / 'log').write_text('kept')"
    toy.notebook("a", "alpha", body=body)
    toy.notebook("d", "alpha")
    book = toy.book("a").read_text()
    (toy.root / "notebooks" / "toy" / "first.ipynb").write_text(book.replace("toy/a", "quickstart"))
    state = toy.results / ".sweep" / "state" / "toy__c.json"
    state.parent.mkdir(parents=True)
    state.write_text('{"status": "failed", "seconds": "many"}')
    return toy


def _step(toy, *arguments: str) -> Step:
    done, copy = toy.sweep(*arguments), toy.root.parent / f"step {len(list(toy.root.parent.iterdir()))}"
    shutil.copytree(toy.results, copy)
    return Step(done.returncode, done.stdout + done.stderr, toy.executed(), copy)


@pytest.fixture(scope="module")
def first(toy) -> Step:
    """All notebooks, one after the other."""
    return _step(toy, "--jobs", "1")


@pytest.fixture(scope="module")
def killed(toy, first) -> subprocess.CompletedProcess:
    """A sweep with another parameter is killed while its notebook runs. Returns a second one that began beside it."""
    driver = _start(toy)
    _wait_for(lambda: _log(toy))
    second, family = toy.sweep("--only", "toy/b"), _children(driver.pid)
    driver.kill()
    driver.wait()
    _wait_for(lambda: not any(map(_is_alive, family)))
    assert family
    assert toy.executed() == ["toy/a"]
    return second


@pytest.fixture(scope="module")
def harmed(toy, killed) -> Step:
    """A module has changed; three notebooks fail, each in its own way."""
    (toy.root / "toolkit" / "beta.py").write_text("def helper():\n    return 2\n")
    toy.notebook("c", "alpha", body=KILL_JOB)
    toy.notebook("d", "alpha", body="raise RuntimeError('on purpose')")
    toy.notebook("e", "alpha", body="(run.folder / 'page.html').mkdir(parents=True)")
    return _step(toy)


@pytest.fixture(scope="module")
def mended(toy, harmed) -> Step:
    """The three are as they should be, and a preset changes a parameter of a fourth one."""
    for name in ("c", "d", "e"):
        toy.notebook(name, "alpha")
    return _step(toy, "--preset", "quick")


def test_a_sweep_tells_at_once_what_it_found_and_how_long_it_takes(toy, first):
    """The quickstart comes first, whatever the notebooks' order; the report is there from then on."""
    assert first.status == 0, first.printed
    assert first.executed == ["quickstart", "toy/a", "toy/b", "toy/d"]
    lines = first.printed.splitlines()
    assert lines[0].startswith("reading the notebooks")
    assert "4 to run: how long it takes is not known" in lines[1]
    assert "predictions" in first.printed
    events = [line[10:] for line in lines if line[10:].split(" ")[0] in first.executed]
    assert events[0].startswith("quickstart running")
    done = next(number for number, line in enumerate(lines) if "quickstart done" in line)
    assert lines[done + 1].strip() == "packing helps."
    assert "the report so far" in lines[done + 2]
    assert str(toy.results / "report" / "index.html") in lines[done + 2]
    assert "<h2>Toy" in first.page("index")  # a paper without claims
    assert (first.results / "report" / "toy-a.html").is_file()


def test_progress_goes_to_the_log_and_not_onto_the_page(first):
    log = (first.results / ".sweep" / "snakemake.log").read_text().splitlines()
    for count in range(3):
        assert [line for line in log if line.startswith(f"toy/a: toy work: {count}/2 steps")]
    assert "/2 steps" in (first.results / "toy" / "a" / "notebook.ipynb").read_text()
    assert "/2 steps" not in first.page("toy-a")


def test_only_what_changed_runs_again(first, harmed, mended):
    assert harmed.executed == ["toy/b", "toy/c", "toy/d", "toy/e"]
    assert (first.table("toy/b"), harmed.table("toy/b")) == ([1, 1], [1, 2])
    assert mended.status == 0, mended.printed
    assert mended.executed == ["toy/a", "toy/c", "toy/e"]  # the results of toy/d are those of its notebook again
    assert (harmed.table("toy/a"), mended.table("toy/a")) == ([1, 1], [7, 1])  # by the preset
    assert "4 to run: about " in harmed.printed.splitlines()[1]


def test_a_killed_driver_leaves_nothing_running_and_no_harm(first, killed, harmed):
    """A second sweep on the same results is refused as long as the first one runs."""
    assert (killed.returncode, killed.stderr.count("\n")) == (2, 1)
    assert "another sweep" in killed.stderr
    assert "toy/a running" not in harmed.printed
    assert _files(harmed.results / "toy" / "a") == _files(first.results / "toy" / "a")
    assert list(harmed.results.rglob(".partial-*")) == []


def test_a_failure_keeps_other_results_and_its_own_previous_ones(first, harmed):
    """So does a job that the kernel's out-of-memory killer ends: nothing can be written after that."""
    assert harmed.status == 1
    assert "failed: RuntimeError: on purpose" in harmed.printed
    assert "failed: its process was killed" in harmed.printed
    table = "toy/d/table.csv"
    assert (harmed.results / table).read_bytes() == (first.results / table).read_bytes()
    assert "on purpose" in harmed.page("toy-d")
    assert "on purpose" in harmed.page("index")
    assert "its process was killed" in harmed.page("index")


def test_trouble_outside_the_cells_costs_neither_other_results_nor_the_report(harmed):
    assert "toy/e done" not in harmed.printed
    assert "its results cannot be kept: " in harmed.printed
    assert "page.html: a folder is where a file is expected" in harmed.printed
    assert "its results cannot be kept" in harmed.page("index")
    assert (harmed.results / "toy" / "a" / "more" / "log").read_text() == "kept"


def test_an_interrupted_driver_stops_its_job_at_once_and_the_results_stay(toy, mended):
    """At two moments: Snakemake has just started, and the notebook runs."""
    for moment in (_children, lambda _: _log(toy)):
        driver = _start(toy)
        _wait_for(partial(moment, driver.pid))
        family = _children(driver.pid)
        driver.send_signal(signal.SIGINT)  # to the driver alone
        assert driver.wait(timeout=60) == 130
        psutil.wait_procs(family, timeout=5)
        assert not any(map(_is_alive, family))
        assert _files(toy.results / "toy") == _files(mended.results / "toy")
    toy.executed()


def test_nothing_runs_where_nothing_changed(toy, mended, monkeypatch, capsys):
    """A report without a preset calls no results of another one out of date."""
    monkeypatch.setattr(paths, "root", lambda: toy.root)
    monkeypatch.setenv("TOOLKIT_RESULTS_DIR", str(toy.results))
    module, index = toy.root / "toolkit" / "beta.py", toy.results / "report" / "index.html"
    module.write_text("# a comment changes nothing\n" + module.read_text())
    assert main(["--preset", "quick"]) == 0
    assert "6 of 6 notebooks up to date, 0 to run" in capsys.readouterr().out
    assert toy.executed() == []
    assert "was killed" not in index.read_text()
    assert main(["--report-only"]) == 0
    assert "out of date" not in index.read_text()
    assert main(["--report-only", "--preset", "standard"]) == 0
    assert "out of date" in index.read_text()
    assert main(["--report-zip"]) == 0
    with zipfile.ZipFile(toy.results / "report.zip") as packed:
        assert "report/index.html" in packed.namelist()


def test_text_needs_no_quotes_and_a_model_folder_may_be_relative(checkout, told, tmp_path, monkeypatch):
    checkout.notebook("a", "alpha", parameters="value = 1\nlabel = 'x'\nmodel = 'smollm2-135m'")
    assert 'label="some text"' in told("--dry-run", "--only", "toy/a", "--set", "label=some text").stdout
    (tmp_path / "elsewhere" / "mine").mkdir(parents=True)
    monkeypatch.setenv("TOOLKIT_CALLED_FROM", str(tmp_path / "elsewhere"))
    monkeypatch.setenv("TOOLKIT_RESULTS_DIR", "")  # `--model` sets it
    found = told("--dry-run", "--only", "toy/a", "--model", "./mine")
    assert f"{tmp_path}/elsewhere/mine" in found.stdout + found.stderr
    assert paths.results_dir() == checkout.results / "models" / "mine"


def test_a_point_of_a_grid_that_saves_nothing_has_failed_and_costs_only_itself(tmp_path):
    """By a profile of Snakemake, with which nothing is forked; odd places do no harm there, either."""
    checkout = make_checkout(tmp_path / ODD, tmp_path / f"a: {ODD}")
    checkout.notebook("a", "alpha", body="if value == 2:\n    run.evidence = lambda *a, **k: None")
    (tmp_path / "config.yaml").write_text("executor: local\ncores: 1\n")
    done = checkout.sweep("--only", "toy/a", "--grid", "value=1,2", "--profile", str(tmp_path))
    assert done.returncode == 1
    assert "without saving table.csv" in done.stdout
    grid = checkout.results / "grid" / "value"
    runs = pd.read_csv(grid / "grid.csv").set_index("grid_value")
    assert runs["status"].str.split(":").str[0].to_dict() == {1: "done", 2: "failed"}
    assert pd.read_csv(grid / "tables" / "toy-a.csv")[["grid_value", "value"]].to_numpy().tolist() == [[1, 1], [1, 1]]
    assert sorted(page.name for page in (grid / "report").glob("value-*.html")) == [
        f"value-{value}-toy-a.html" for value in (1, 2)
    ]
    assert not (checkout.results / "toy").exists()


def test_bad_input_is_one_line_and_status_2_before_any_work(checkout, told):
    for arguments, names in (
        (["--only", "toy/z"], ["toy/z", "toy/a", "toy/b"]),
        (["--set", "wrong=1"], ["wrong", "label", "value"]),
        (["--set", "value=one"], ["toy/", ": value = ", '"one"', "expected a whole number"]),
        (["--set", "value=" + "[" * 100_000], ["value = "]),
        (["--grid", "value"], ["--grid value", "NAME=VALUE,VALUE"]),
    ):
        done = told(*arguments)
        assert (done.returncode, done.stderr.count("\n")) == (2, 1), arguments
        assert all(name in done.stderr for name in names), done.stderr
    assert not checkout.results.exists()


def test_list_and_dry_run_run_nothing(checkout, told):
    listing, dry = told("--list"), told("--dry-run", "--preset", "quick")
    assert [line.split()[0] for line in listing.stdout.splitlines()] == ["toy/a", "toy/b"]
    assert "to run" in dry.stdout
    assert "value=7" in dry.stdout
    assert checkout.executed() == []


def test_trouble_of_snakemake_itself_names_its_log(tmp_path):
    (tmp_path / "config.yaml").write_text("executor: local\ncores: many\n")
    refused = make_checkout(tmp_path / "checkout").sweep("--profile", str(tmp_path), "--only", "toy/b")
    assert refused.returncode == 2
    assert "snakemake.log" in refused.stderr


def _start(toy) -> subprocess.Popen:
    """A sweep whose notebook runs for ten minutes."""
    heed = partial(signal.signal, signal.SIGINT, signal.default_int_handler)  # shells have background jobs ignore it
    command = toy.command("--only", "toy/a", "--preset", "paper")
    return subprocess.Popen(command, env=toy.environment, stdout=subprocess.DEVNULL, preexec_fn=heed)


def _children(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


def _is_alive(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != "zombie"


def _files(folder: Path) -> dict[Path, bytes]:
    return {file.relative_to(folder): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def _log(checkout) -> str:
    log = checkout.root / "log"
    return log.read_text() if log.exists() else ""


def _wait_for(condition, seconds: float = 90) -> None:
    end = time.time() + seconds
    while not condition():
        assert time.time() < end, "waited in vain"
        time.sleep(0.1)

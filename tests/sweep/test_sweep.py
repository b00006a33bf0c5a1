"""The engine's promises, tried on toy notebooks: what reruns, what survives a failure or a kill, what is refused."""

import signal
import subprocess
import time
from functools import partial

import pandas as pd
import psutil
import pytest

from toolkit import paths
from toolkit import progress as bars
from toolkit.sweep.plan import make_jobs


def test_only_what_changed_runs_again(checkout):
    first = checkout.sweep()
    assert first.returncode == 0, first.stdout + first.stderr
    assert checkout.executed() == ["toy/a", "toy/b"]
    assert "toy/a" in first.stdout
    assert "predictions" in first.stdout
    assert (checkout.results / "report" / "index.html").exists()
    assert (checkout.results / "report" / "toy-a.html").exists()

    module = checkout.root / "toolkit" / "beta.py"
    module.write_text("# a comment changes nothing\n" + module.read_text())
    assert checkout.sweep().returncode == 0
    assert checkout.executed() == []

    module.write_text("def helper():\n    return 2\n")
    table = checkout.results / "toy" / "a" / "table.csv"
    kept = table.read_text()
    table.write_text(kept.replace("1", "3", 1))  # a digit of a kept result
    assert len(table.read_text()) == len(kept)
    checkout.sweep()
    assert checkout.executed() == ["toy/a", "toy/b"]
    assert table.read_text() == kept
    assert pd.read_csv(checkout.results / "toy" / "b" / "table.csv")["value"].tolist() == [1, 2]


def test_a_sweep_tells_at_once_what_it_found_and_how_long_it_takes(checkout, monkeypatch):
    """The quickstart comes first, whatever the catalogue's order; the report is there from then on."""
    rows = checkout.root / "data" / "catalogue.yaml"
    rows.write_text(rows.read_text() + "- {id: quickstart, file: toy/first.ipynb, title: first, question: first}\n")
    seen = "print('Seen: packing helps. The rest is longer.')"
    checkout.notebook("a", "alpha", body=seen)
    book = (checkout.root / "notebooks" / "toy" / "a_toy.ipynb").read_text()
    (checkout.root / "notebooks" / "toy" / "first.ipynb").write_text(book.replace("toy/a", "quickstart"))
    found = checkout.sweep("--jobs", "1")
    lines = found.stdout.splitlines()
    assert found.returncode == 0, found.stderr
    assert lines[0].startswith("reading the notebooks")
    assert "3 to run: how long it takes is not known" in lines[1]
    events = [line[10:] for line in lines if line[10:].split(" ")[0] in ("toy/a", "toy/b", "quickstart")]
    assert events[0].startswith("quickstart running")
    done = next(number for number, line in enumerate(lines) if "quickstart done" in line)
    assert lines[done + 1].strip() == "packing helps."
    assert "the report so far" in lines[done + 2]
    assert str(checkout.results / "report" / "index.html") in lines[done + 2]
    checkout.notebook("a", "alpha", body=seen + "  # anew")
    assert "1 to run: about " in checkout.sweep().stdout.splitlines()[1]


def test_a_changed_data_file_makes_only_what_reads_it_stale(checkout, monkeypatch):
    """Module beta reads machines; `Run` compares with the claims of its notebook's paper."""
    monkeypatch.setattr(paths, "root", lambda: checkout.root)
    reads = 'READS = ("data/machines/*.yaml",)\ndef helper():\n    return 1\n'
    (checkout.root / "toolkit" / "beta.py").write_text(reads)
    files = {name: checkout.root / "data" / f"{name}.yaml" for name in ("machines/one", "claims/toy", "claims/other")}
    for file in files.values():
        file.parent.mkdir(exist_ok=True)
        file.write_text("- value: 1\n")
    for name, stale in {"claims/other": [], "machines/one": ["toy/b"], "claims/toy": ["toy/a", "toy/b"]}.items():
        before = {job.id: job.key for job in make_jobs([])}
        files[name].write_text("- value: 2\n")
        assert [job.id for job in make_jobs([]) if job.key != before[job.id]] == stale, name


def test_preset_and_set_reach_the_notebook_and_the_report(checkout, told):
    """A report without a preset calls no results of another one out of date."""
    table, index = checkout.results / "toy" / "a" / "table.csv", checkout.results / "report" / "index.html"
    assert checkout.sweep("--preset", "quick", "--only", "toy/a").returncode == 0
    assert pd.read_csv(table)["value"].tolist() == [7, 1]
    assert told("--report-only").returncode == 0
    assert "out of date" not in index.read_text()
    assert told("--report-only", "--preset", "standard").returncode == 0
    assert "out of date" in index.read_text()
    changed = told("--dry-run", "--preset", "quick", "--set", "value=9", "--only", "toy/a").stdout
    assert changed.startswith("to run")
    assert "value=9" in changed


def test_text_needs_no_quotes_and_a_model_folder_may_be_relative(checkout, told, tmp_path, monkeypatch):
    checkout.notebook("a", "alpha", parameters="value = 1\nlabel = 'x'\nmodel = 'smollm2-135m'")
    assert 'label="some text"' in told("--dry-run", "--only", "toy/a", "--set", "label=some text").stdout
    (tmp_path / "elsewhere" / "mine").mkdir(parents=True)
    monkeypatch.setenv("TOOLKIT_CALLED_FROM", str(tmp_path / "elsewhere"))
    monkeypatch.setenv("TOOLKIT_RESULTS_DIR", "")  # `--model` sets it
    found = told("--dry-run", "--only", "toy/a", "--model", "./mine")
    assert f"{tmp_path}/elsewhere/mine" in found.stdout + found.stderr
    assert paths.results_dir() == checkout.results / "models" / "mine"


def test_relative_folders_of_the_environment_are_meant_where_the_command_was_called(checkout, told, monkeypatch):
    monkeypatch.setenv("TOOLKIT_CALLED_FROM", str(checkout.root))
    monkeypatch.setenv("TOOLKIT_RESULTS_DIR", "of mine")
    assert told("--report-only").returncode == 0
    assert (checkout.root / "of mine" / "report" / "index.html").is_file()


def test_an_interrupted_driver_stops_its_job_at_once(checkout):
    checkout.notebook("a", "alpha", body="import time\ntime.sleep(600)")
    command, quiet = checkout.command("--only", "toy/a"), subprocess.DEVNULL
    heed = partial(signal.signal, signal.SIGINT, signal.default_int_handler)  # shells have background jobs ignore it
    driver = subprocess.Popen(command, env=checkout.environment, stdout=quiet, preexec_fn=heed)
    _wait_for(lambda: "toy/a" in _log(checkout))
    family = psutil.Process(driver.pid).children(recursive=True)
    driver.send_signal(signal.SIGINT)  # to the driver alone
    assert driver.wait(timeout=60) == 130
    _wait_for(lambda: not any(member.is_running() and member.status() != "zombie" for member in family), seconds=5)


def test_a_failure_keeps_other_results_and_its_own_previous_ones(checkout):
    """So does a job that the kernel's out-of-memory killer ends: nothing can be written after that."""
    assert checkout.sweep().returncode == 0
    before = (checkout.results / "toy" / "a" / "table.csv").read_bytes()
    checkout.notebook("a", "alpha", body="raise RuntimeError('on purpose')")
    checkout.notebook("b", "beta", body="extra = 1")
    checkout.notebook("c", "alpha", body="import os, signal\nos.kill(os.getppid(), signal.SIGKILL)")
    failed = checkout.sweep()
    assert failed.returncode == 1
    assert "RuntimeError: on purpose" in failed.stdout
    assert "failed: its process was killed" in failed.stdout
    assert checkout.executed() == ["toy/a", "toy/a", "toy/b", "toy/b", "toy/c"]
    assert (checkout.results / "toy" / "a" / "table.csv").read_bytes() == before
    assert "on purpose" in (checkout.results / "report" / "toy-a.html").read_text()
    index = (checkout.results / "report" / "index.html").read_text()
    assert "on purpose" in index
    assert "its process was killed" in index
    for name in ("a", "c"):
        checkout.notebook(name, "alpha")
    assert checkout.sweep().returncode == 0
    assert checkout.executed() == ["toy/a", "toy/c"]


def test_progress_goes_to_the_log_and_not_onto_the_page(checkout, monkeypatch):
    """So it does by a profile of Snakemake."""
    (checkout.root / "profile").mkdir()
    (checkout.root / "profile" / "config.yaml").write_text("executor: local\ncores: 1\n")
    monkeypatch.delenv(bars.SWITCH)
    body = "from toolkit import progress as bars\nbars.DELAY_S = bars.ELSEWHERE_S = 0\n"
    body += "with bars.progress('toy work', 2, 'steps') as bar:\n    [bar.update() for _ in range(2)]"
    checkout.notebook("a", "alpha", body=body)
    assert checkout.sweep("--only", "toy/a", "--profile", str(checkout.root / "profile")).returncode == 0
    log = (checkout.results / ".sweep" / "snakemake.log").read_text().splitlines()
    for count in range(3):
        assert [line for line in log if line.startswith(f"toy/a: toy work: {count}/2 steps")]
    assert "/2 steps" in (checkout.results / "toy" / "a" / "notebook.ipynb").read_text()
    assert "/2 steps" not in (checkout.results / "report" / "toy-a.html").read_text()
    assert "<h2>Toy" in (checkout.results / "report" / "index.html").read_text()  # a paper without claims


def test_a_point_of_a_grid_that_saves_nothing_has_failed_and_costs_only_itself(checkout):
    checkout.notebook("a", "alpha", body="if value == 2:\n    run.save = lambda *a, **k: None")
    done = checkout.sweep("--only", "toy/a", "--grid", "value=1,2,3")
    assert done.returncode == 1
    assert "without saving table.csv" in done.stdout
    grid = checkout.results / "grid" / "value"
    points = pd.read_csv(grid / "points.csv").set_index("grid_value")
    assert points["status"].str.split(":").str[0].to_dict() == {1: "done", 2: "failed", 3: "done"}
    assert pd.read_csv(grid / "tables" / "toy-a.csv")[["grid_value", "value"]].to_numpy().tolist() == [
        *([1, 1], [1, 1], [3, 3], [3, 1]),
    ]
    assert sorted(page.name for page in (grid / "report").glob("value-*")) == [
        f"value-{value}-toy-a.html" for value in (1, 2, 3)
    ]
    assert not (checkout.results / "toy").exists()


def test_trouble_outside_the_cells_costs_neither_other_results_nor_the_report(checkout, told):
    more = "(run.folder / 'more').mkdir(parents=True)\n(run.folder / 'more' / 'log').write_text('kept')"
    checkout.notebook("a", "alpha", body=more)
    checkout.notebook("b", "beta", body="(run.folder / 'page.html').mkdir(parents=True)")
    (checkout.results / ".sweep" / "state").mkdir(parents=True)
    (checkout.results / ".sweep" / "state" / "toy__c.json").write_text('{"status": "failed", "seconds": "many"}')
    done = checkout.sweep()
    assert done.returncode == 1
    assert "toy/b done" not in done.stdout
    assert "its results cannot be kept: " in done.stdout
    assert "page.html: a folder is where a file is expected" in done.stdout
    assert (checkout.results / "toy" / "a" / "more" / "log").read_text() == "kept"
    assert "its results cannot be kept" in (checkout.results / "report" / "index.html").read_text()
    assert told("--dry-run", "--only", "toy/a").stdout.startswith("up to date")


def test_killed_driver_leaves_nothing_running_and_the_rest_completes(checkout):
    """A second sweep on the same results is refused as long as the first one runs."""
    gate = checkout.root / "gate"
    wait = f"import pathlib, time\nwhile not pathlib.Path({str(gate)!r}).exists():\n    time.sleep(0.05)"
    checkout.notebook("b", "beta", body=wait)
    driver = subprocess.Popen(checkout.command("--jobs", "2"), env=checkout.environment, stdout=subprocess.DEVNULL)
    _wait_for(lambda: (checkout.results / "toy" / "a" / "done.json").exists() and "toy/b" in _log(checkout))
    second = checkout.sweep("--only", "toy/b")
    assert second.returncode == 2
    assert "another sweep" in second.stderr
    family = psutil.Process(driver.pid).children(recursive=True)
    assert family
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    _wait_for(lambda: not any(member.is_running() and member.status() != "zombie" for member in family))
    assert list((checkout.results / "toy" / "b").glob("*")) == []  # Snakemake makes the folder
    assert checkout.executed() == ["toy/a", "toy/b"]
    gate.touch()
    assert checkout.sweep().returncode == 0
    assert checkout.executed() == ["toy/b"]
    assert list(checkout.results.rglob(".partial-*")) == []


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (["--only", "toy/z"], ["toy/z", "toy/a", "toy/b"]),
        (["--preset", "slow"], ["slow", "quick", "standard", "paper"]),
        (["--set", "wrong=1"], ["wrong", "label", "value"]),
        (["--set", "value"], ["NAME=VALUE"]),
        (["--set", "value=one"], ["toy/", ": value = ", '"one"', "expected a whole number"]),
        (["--set", 'value="one"'], ["expected a whole number"]),
        (["--set", "value=true", "--dry-run"], ["value = true", "expected a whole number"]),
        (["--set", "value=" + "[" * 100_000], ["value = ", "expected a whole number"]),
        (["--jobs", "0"], ["--jobs 0"]),
        (["--profile", "nowhere"], ["nowhere", "config.yaml"]),
        (["--grid", "value"], ["--grid value", "NAME=VALUE,VALUE"]),
        (["--grid", "value=1,one"], ["toy/a: value = ", "expected a whole number"]),
        (["--grid", "value=1,1"], ["1 comes twice"]),
        (["--grid", "wrong=1,2"], ["wrong", "label, value"]),
        (["--nonsense"], ["--nonsense"]),
    ],
)
def test_bad_input_is_one_line_and_status_2_before_any_work(checkout, told, arguments, names):
    done = told(*arguments)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert all(name in done.stderr for name in names)
    assert not checkout.results.exists()


def test_values_that_a_notebook_may_not_take_are_refused_before_any_work(checkout, told):
    rules = "parameters: {value: {type: integer, at_most: 9}, label: {choices: [x, some text]}}\n"
    (checkout.root / "notebooks" / "parameters.yaml").write_text(
        rules + "notebooks: {toy/b: {label: {choices: [x]}}}\n"
    )
    for setting, words in {
        "value=10": "error: toy/a: value = 10: expected a whole number to 9\n",
        "label=ome text": 'error: toy/a: label = "ome text": expected one of x, some text; '
        "did you mean 'some text'?\n",
        "label=some text": 'error: toy/b: label = "some text": expected one of x\n',
    }.items():
        for arguments in ([], ["--dry-run"]):
            done = told("--set", setting, *arguments)
            assert (done.returncode, done.stderr) == (2, words)
    assert not checkout.results.exists()


def test_a_preset_for_a_parameter_that_is_not_there_is_refused(checkout, told):
    (checkout.root / "notebooks" / "presets.yaml").write_text("toy/a:\n  quick: {valu: 7}\n")
    done = told("--preset", "quick")
    assert done.returncode == 2
    assert "valu" in done.stderr


def test_list_and_dry_run_run_nothing(checkout, told):
    listing, dry = told("--list"), told("--dry-run", "--preset", "quick")
    assert [line.split()[0] for line in listing.stdout.splitlines()] == ["toy/a", "toy/b"]
    assert "to run" in dry.stdout
    assert "value=7" in dry.stdout
    assert checkout.executed() == []


def test_trouble_of_snakemake_itself_names_its_log(checkout):
    (checkout.root / "profile").mkdir()
    (checkout.root / "profile" / "config.yaml").write_text("executor: local\ncores: many\n")
    refused = checkout.sweep("--profile", str(checkout.root / "profile"), "--only", "toy/b")
    assert refused.returncode == 2
    assert "snakemake.log" in refused.stderr


def _log(checkout) -> str:
    log = checkout.root / "log"
    return log.read_text() if log.exists() else ""


def _wait_for(condition, seconds: float = 90) -> None:
    end = time.time() + seconds
    while not condition():
        assert time.time() < end, "waited in vain"
        time.sleep(0.1)

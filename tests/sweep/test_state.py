"""Files that the sweep keeps, in any shape: what is not as it was written counts as absent, and nothing raises."""

import json
import math
import os
import socket
from dataclasses import asdict

import pytest

from toolkit import files, paths
from toolkit.evidence.catalogue import rows
from toolkit.evidence.page import read_book
from toolkit.evidence.report import write_report
from toolkit.files import put_in_place, scratch_folder
from toolkit.sweep import __main__, driver, execute, state
from toolkit.sweep.forecast import forecast
from toolkit.sweep.plan import Job
from toolkit.sweep.state import State

KEY = "key of the job"
SHAPES = {
    "empty": b"",
    "truncated": b'{"key": "key of',
    "null": b"null",
    "list": b'[{"key": 1}]',
    "number": b"1e999",
    "text": b'"done"',
    "deep": b"[" * 100_000,
    "deep mapping": b'{"key":' * 100_000,
    "encoding": b'{"key": "\xff\xfe"}',
    "UTF-16": '{"key": 1}'.encode("utf-16"),
    "NUL": b"\0" * 64,
    "no mapping of sums": json.dumps({"key": KEY, "sha256": ["table.csv"]}).encode(),
    "no sums": json.dumps({"key": KEY, "sha256": {}}).encode(),
    "a name that is none": json.dumps(
        {"key": KEY, "sha256": dict.fromkeys(["table.csv", "meta.json", "\0", "a" * 5000])}
    ).encode(),
    "odd sums": json.dumps({"key": KEY, "sha256": {"table.csv": [1], "meta.json": {"a": None}}}).encode(),
    "wrong types": json.dumps({name: [1] for name in asdict(State("a", "running", 0.0))}).encode(),
    "wrong pid": json.dumps(asdict(State("toy/a", "running", 1.0, host=socket.gethostname(), pid=-5))).encode(),
    "huge pid": json.dumps(asdict(State("toy/a", "running", 1.0, host=socket.gethostname(), pid=10**30))).encode(),
    "a duration in words": b'{"parameters": {}, "wall_s": "long"}',
    "no number": b'{"parameters": {}, "wall_s": NaN}',
    "less than nothing": b'{"parameters": {}, "wall_s": -1.0}',
}


@pytest.fixture
def job(tmp_path, monkeypatch):
    monkeypatch.setenv("TOOLKIT_RESULTS_DIR", str(tmp_path))
    job = Job("toy/a", "a", "nowhere.ipynb", {}, KEY, 1, False)
    job.folder.mkdir(parents=True)
    for name in ("table.csv", "meta.json"):
        (job.folder / name).write_text("1")
    return job


def test_what_a_killed_sweep_was_making_goes_at_points_of_a_grid_too(tmp_path, monkeypatch):
    monkeypatch.setenv("TOOLKIT_RESULTS_DIR", str(tmp_path))
    for parent in (tmp_path / "toy", tmp_path / "value-1" / "toy"):
        parent.mkdir(parents=True)
        _, lock = files._new_scratch(parent)
        os.close(lock)
    state.stop_leftovers()
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["toy", "toy", "value-1"]


@pytest.mark.parametrize("content", SHAPES.values(), ids=SHAPES)
def test_a_kept_file_of_any_shape(job, content):
    files = [state._file(job.id), job.folder / "done.json", job.folder / "meta.json", state.failed_page(job.id)]
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
    assert not job.is_fresh()
    assert all(0 <= seconds < math.inf for seconds in forecast([job], 1).seconds.values())
    last = state.load(job.id)
    assert last is None or (last.status, last.error) == ("failed", state.KILLED)
    assert "toy/a" in driver.summary([job])
    assert read_book(files[-1]) == {"cells": []}
    state.stop_leftovers()
    assert state.load(job.id) is None


def test_a_folder_in_the_place_of_a_kept_file(job):
    for file in (state._file(job.id), job.folder / "done.json"):
        file.mkdir(parents=True)
    assert not job.is_fresh()
    assert state.load(job.id) is None
    assert forecast([job], 1).seconds == {}


def test_the_report_is_made_beside_broken_files(job):
    """Each shape in the place of another notebook's files."""
    for id, content in zip(rows(), SHAPES.values(), strict=False):
        folder = job.folder.parents[1] / id
        folder.mkdir(parents=True)
        for name in ("meta.json", "notebook.ipynb"):
            (folder / name).write_bytes(content)
    index = write_report(driver.outcomes([]))
    assert index.read_text().count("has no meta.json of this notebook: run it again") == len(SHAPES)
    for page in index.parent.glob("*-*.html"):
        assert "The notebook's cells cannot be shown." in page.read_text()


def test_a_running_job_whose_process_is_gone_has_failed(job):
    running = State(job.id, "running", 1.0, **state.this_process())
    running.save()
    assert state.load(job.id) == running
    State(job.id, "running", 1.0, **state.this_process() | {"process_started": 2.0}).save()
    assert state.load(job.id).status == "failed"
    State(job.id, "running", 1.0, host="another machine", pid=os.getpid()).save()
    assert state.load(job.id).status == "running"


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyError("latex"), RecursionError("deep")])
def test_trouble_while_publishing_is_the_jobs_own_error(job, monkeypatch, tmp_path, error):
    """A full disk, or mathematics that no converter takes: the job ends with a line, not a traceback."""

    def fail(*_):
        raise error

    staging = tmp_path / "staging"
    staging.mkdir()
    monkeypatch.setattr(Job, "about", lambda job: None)
    monkeypatch.setattr(execute, "write_page", fail)
    assert execute._finish(job, staging).startswith(f"its results cannot be kept: {type(error).__name__}")


def test_results_that_cannot_be_published_leave_the_previous_ones(job):
    with scratch_folder(job.folder.parent) as scratch, pytest.raises(FileNotFoundError):
        put_in_place(scratch / "no staging", job.folder)
    assert (job.folder / "table.csv").read_text() == "1"


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (
            OSError(28, "No space left on device"),
            "error: {results}: no space left; free some, or set TOOLKIT_RESULTS_DIR",
        ),
        (PermissionError(13, "Permission denied", "/x"), "error: /x: no permission; "),
    ],
)
def test_trouble_with_a_disk_is_one_line(job, monkeypatch, capsys, error, told):
    def fail(*_):
        raise error

    monkeypatch.setattr(driver, "run", fail)
    monkeypatch.setattr(__main__, "make_jobs", lambda *_: [])
    assert __main__.main(["--only", "quickstart"]) == 2
    said = capsys.readouterr().err
    assert said.startswith(told.format(results=paths.results_dir()))
    assert said.count("\n") == 1


def test_published_results_are_fresh_until_a_file_changes(job, monkeypatch):
    monkeypatch.setattr(Job, "about", lambda job: None)
    monkeypatch.setattr(execute, "write_page", lambda executed, page, about: page.write_text("page"))
    with scratch_folder(job.folder.parent) as scratch:
        staging = scratch / job.folder.name
        staging.mkdir()
        for name in ("table.csv", "meta.json"):
            (staging / name).write_text("new")
        assert execute._finish(job, staging) is None
    assert job.is_fresh()
    (job.folder / "page.html").write_text("Page")
    assert not job.is_fresh()

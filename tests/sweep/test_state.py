"""What the sweep knows of its jobs, and what it publishes of them."""

import os
from dataclasses import replace

import pytest

from toolkit import files, paths
from toolkit.files import put_in_place, scratch_folder
from toolkit.sweep import __main__, driver, execute, state
from toolkit.sweep.plan import Job
from toolkit.sweep.state import State

KEY = "key of the job"


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
        lock.release()
    state.remove_unfinished()
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["toy", "toy", "value-1"]


def test_a_running_job_whose_process_is_gone_has_failed(job):
    running = State(job.id, "running", 1.0, **state.this_process())
    running.save()
    assert state.load(job.id) == running
    State(job.id, "running", 1.0, **state.this_process() | {"process_started": 2.0}).save()
    assert state.load(job.id).status == "failed"
    State(job.id, "running", 1.0, host="another machine", pid=os.getpid()).save()
    assert state.load(job.id).status == "running"


def test_trouble_while_publishing_is_the_jobs_own_error(job, monkeypatch, tmp_path):
    """Mathematics that no converter takes, say: the job ends with a line, not a traceback."""

    def fail(*_):
        raise KeyError("latex")

    staging = tmp_path / "staging"
    staging.mkdir()
    monkeypatch.setattr(Job, "about", lambda job: None)
    monkeypatch.setattr(execute, "write_page", fail)
    assert execute._finish(job, staging).startswith("its results cannot be kept: KeyError")


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


def test_results_are_fresh_for_the_job_that_published_them(job, monkeypatch):
    monkeypatch.setattr(Job, "about", lambda job: None)
    monkeypatch.setattr(execute, "write_page", lambda executed, page, about: page.write_text("page"))
    assert not job.is_fresh()
    with scratch_folder(job.folder.parent) as scratch:
        staging = scratch / job.folder.name
        staging.mkdir()
        for name in ("table.csv", "meta.json"):
            (staging / name).write_text("new")
        assert execute._finish(job, staging) is None
    assert job.is_fresh()
    assert not replace(job, key="another key").is_fresh()
    (job.folder / "table.csv").unlink()
    assert not job.is_fresh()

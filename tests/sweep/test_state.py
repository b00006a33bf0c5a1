"""The sweep's state of its jobs, and the part of it that is published."""

import os
from dataclasses import replace

import pytest

from toolkit.files import scratch_folder
from toolkit.sweep import execute, state
from toolkit.sweep.jobs import Job, make_jobs
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


def test_a_running_job_whose_process_is_gone_has_failed(job):
    running = State(job.id, "running", 1.0, **state.this_process())
    running.save()
    assert state.load(job.id) == running
    State(job.id, "running", 1.0, **state.this_process() | {"process_started": 2.0}).save()
    assert state.load(job.id).status == "failed"
    State(job.id, "running", 1.0, host="another machine", pid=os.getpid()).save()
    assert state.load(job.id).status == "running"


def test_a_job_tells_its_notebook_which_figure_it_is(tmp_path, monkeypatch):
    told = []
    monkeypatch.setattr(execute, "run_notebook", lambda *arguments: told.append(arguments[-1]))
    monkeypatch.setattr(os, "environ", os.environ.copy())
    (job,) = make_jobs(["endor/fig12"], "quick")
    assert execute._execute(job, tmp_path) is None
    assert told == [job.parameters | {"figure": "fig12"}]
    assert "figure" not in job.parameters


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

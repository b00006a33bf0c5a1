"""How long a sweep takes, by durations made up."""

import json
import time

import pytest

from toolkit import paths
from toolkit.sweep.forecast import START_S, STEADY_S, Forecast, forecast, longest_seconds
from toolkit.sweep.jobs import Job
from toolkit.sweep.state import State


@pytest.fixture
def root(tmp_path, monkeypatch):
    monkeypatch.setattr(paths, "root", lambda: tmp_path)
    monkeypatch.setenv("TOOLKIT_RESULTS_DIR", str(tmp_path / "results"))
    return tmp_path


def job(id, alone=False, threads=1, **parameters):
    return Job(id, id, "", {"size": 1} | parameters, "", threads, alone)


def keep(folder, id, wall_s, threads=1, **parameters):
    (folder / id).mkdir(parents=True)
    meta = {"id": id, "wall_s": wall_s, "threads": threads, "parameters": {"size": 1} | parameters}
    (folder / id / "meta.json").write_text(json.dumps(meta))


def test_of_each_notebook_the_run_here_counts_before_that_of_a_reference(root):
    keep(root / "results", "toy/a", 11)
    for machine, wall_s in (("warm", 1), ("cold", 91)):
        for id in ("toy/a", "toy/b"):
            keep(root / "results" / "reference" / machine, id, wall_s)
    expected = forecast([job("toy/a"), job("toy/b"), job("toy/c", size=2)], 1)
    assert expected.seconds == {"toy/a": 11 + START_S, "toy/b": 91 + START_S}
    assert expected.left_s({}) == (20 + 100) * 3 / 2
    words = expected.words()
    assert words.startswith("about 3 min (2 of 3 ran before with these parameters")


def test_cores_are_shared_unless_a_notebook_has_the_machine_alone(root):
    """It ran on one of two cores there; here it has two of four, and two run at once."""
    keep(root / "results", "toy/a", 91, threads=1)
    keep(root / "results", "toy/b", 91, threads=2)
    expected = forecast([job("toy/a", threads=2), job("toy/b", alone=True, threads=4)], 2)
    assert expected.seconds == {"toy/a": 50, "toy/b": 100}
    assert expected.left_s({}) == 50 / 2 + 100


def test_jobs_are_ordered_by_the_longest_run_of_their_notebook_whatever_its_parameters(root):
    keep(root / "results", "toy/a", 11)
    keep(root / "results" / "reference" / "large", "toy/a", 91, size=9)
    keep(root / "results" / "reference" / "small", "toy/b", 31, size=9)
    assert longest_seconds([job("toy/a"), job("toy/b"), job("toy/c")]) == {"toy/a": 91, "toy/b": 31, "toy/c": 0}


def test_what_is_over_tells_the_pace_of_the_rest():
    jobs = [job("toy/a"), job("toy/b"), job("toy/c")]
    expected = Forecast(jobs, 1, {"toy/a": 60.0, "toy/b": 60.0, "toy/c": 30.0})
    begun = {"toy/a": State("toy/a", "done", 0.0, 180.0)}
    pace = (180 + STEADY_S) / (60 + STEADY_S)
    assert expected.left_s(begun) == pytest.approx(pace * 90)
    begun["toy/b"] = State("toy/b", "running", time.time() - 20)
    assert expected.left_s(begun) == pytest.approx(pace * 90 - 20, abs=1)
    begun["toy/b"] = State("toy/b", "running", time.time() - 1000)
    assert expected.left_s(begun) == pytest.approx(pace * 30)
    begun["toy/b"] = State("toy/b", "failed", 0.0, 5.0)
    assert expected.left_s(begun) == pytest.approx(pace * 30)

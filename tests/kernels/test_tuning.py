"""How a fastest way is found and kept, with a clock that the tests turn."""

import pytest

from toolkit.kernels.engine import tuning


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("TOOLKIT_CACHE_DIR", str(tmp_path))
    return tmp_path


def test_minima_of_turns_are_compared():
    now, spent = [0.0], {"a": [9, 5, 5, 50, 5, 5, 5, 5], "b": [9, 6, 60, 60, 60, 4, 60, 60]}

    def run(name):
        now[0] += spent[name].pop(0)  # the first one compiles

    runs = {name: lambda name=name: run(name) for name in spent}
    assert tuning.measure(runs, clock=lambda: now[0]) == {"a": 5, "b": 4}
    assert spent == {"a": [], "b": []}


def test_a_way_that_is_hardly_faster_does_not_replace_the_first():
    assert tuning.choose(("a", "b"), {"a": 1.0, "b": 0.96}) == "a"
    assert tuning.choose(("a", "b"), {"a": 1.0, "b": 0.94}) == "b"
    assert tuning.choose(("a", "b", "c"), {"a": 1.0, "b": 0.9, "c": 0.8}) == "c"


def test_a_choice_is_kept_for_each_operation_and_number_of_threads(monkeypatch, cache):
    seconds = {"a": 2.0, "b": 1.0}
    monkeypatch.setattr(tuning, "measure", lambda runs: {name: seconds[name] for name in runs})

    def ask(operation, threads):
        return tuning.fastest(operation, ("a", "b"), lambda: seconds, threads, "toolkit.kernels.bitmap")

    assert ask("bitmap matvec", 2) == "b"
    seconds["a"] = 0.5
    assert ask("bitmap matvec", 2) == "b", "kept"
    assert ask("bitmap matvec", 3) == "a"
    assert ask("bitmap decompress", 2) == "a"
    for file in cache.rglob("*.json"):
        file.write_text("broken")
    assert ask("bitmap matvec", 2) == "a", "measured again"


def test_a_cache_that_cannot_be_written_gives_the_first(monkeypatch, tmp_path, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TOOLKIT_CACHE_DIR", str(tmp_path / "file"))
    monkeypatch.setattr(tuning, "measure", lambda runs: pytest.fail("measured for nothing"))
    assert tuning.fastest("bitmap matvec", ("a", "b"), dict, 2, "toolkit.kernels.bitmap") == "a"
    assert "bitmap matvec: a, unmeasured, since no choice can be kept" in caplog.text

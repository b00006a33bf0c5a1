"""A sweep in folders with odd names: nothing in a path is taken for a pattern, a comment or a word of a shell."""

import pytest

ODD = 'it\'s a {b} {} {{c}} #d & "e" $HOME %s ünï [f] *?;'


@pytest.fixture
def place(tmp_path):
    return tmp_path / ODD


def test_a_sweep_of_an_odd_place_into_an_odd_place(checkout, tmp_path, monkeypatch):
    results = tmp_path / f"a: {ODD}"  # no colon in the checkout's own path: the tests put that on PYTHONPATH
    monkeypatch.setenv("TOOLKIT_RESULTS_DIR", str(results))
    checkout.notebook("b", "beta", body="raise RuntimeError('on purpose')")
    done = checkout.sweep()
    assert done.returncode == 1
    assert "failed: RuntimeError: on purpose" in done.stdout
    assert checkout.executed() == ["toy/a", "toy/b"]
    assert (results / "report" / "toy-a.html").is_file()
    assert "on purpose" in (results / "report" / "toy-b.html").read_text()
    assert "up to date  toy/a" in checkout.sweep("--dry-run").stdout

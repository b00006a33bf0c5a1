"""Explorers are drawn for the report by the sweep: once, and again when their code changed."""

from types import SimpleNamespace

import nbformat
import pytest

from toolkit.evidence.page import last_image, read_book
from toolkit.sweep import explorers
from toolkit.sweep.explorers import draw_explorers

PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
SHOW = f"from IPython.display import display\ndisplay({{'image/png': '{PIXEL}'}}, raw=True)"


@pytest.fixture
def toy(checkout, monkeypatch):
    """The toy checkout, whose explorers are drawn in this process; `toy.drawn` lists them."""
    checkout.drawn = []

    def run(command, **_):
        checkout.drawn.append(command[-1])
        return SimpleNamespace(stdout=explorers.draw(command[-1]) or "")

    monkeypatch.setattr(explorers.subprocess, "run", run)
    return checkout


def test_an_explorer_is_drawn_once_and_again_when_it_changed(toy, capsys):
    toy.explorer("dials", SHOW)
    executed = toy.results / "explore" / "dials" / "notebook.ipynb"
    for _ in range(2):
        draw_explorers()
        assert toy.drawn == ["explore/dials"]
    assert last_image(read_book(executed)).endswith(PIXEL)
    toy.explorer("dials", f"{SHOW}\nraise ValueError('no dial')")
    draw_explorers()
    assert toy.drawn == ["explore/dials"] * 2
    assert capsys.readouterr().out == "explore/dials: no new picture for the report: ValueError: no dial\n"
    assert len(nbformat.read(executed, as_version=4).cells[1].source.splitlines()) == 2  # the one that worked
    executed.unlink()
    draw_explorers()
    assert toy.drawn == ["explore/dials"] * 3

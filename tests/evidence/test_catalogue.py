"""The notebooks that there are: what their files say of them, and their presets."""

import json

import pytest
import yaml

from toolkit import paths
from toolkit.errors import UserError
from toolkit.evidence import catalogue
from toolkit.evidence.literature import PAPERS, Paper


def book(*sources):
    """A notebook's JSON: the first cell is text, the others are code."""
    kinds = ["markdown", *["code"] * len(sources[1:])]
    return json.dumps(
        {
            "cells": [
                {"cell_type": kind, "metadata": {}, "source": [text]} for kind, text in zip(kinds, sources, strict=True)
            ]
        }
    )


@pytest.fixture
def place(tmp_path, monkeypatch):
    """`place(name, text)` writes a file below `notebooks/`. There is a notebook toy/fig_1, and a paper "toy"."""
    monkeypatch.setattr(paths, "root", lambda: tmp_path)
    monkeypatch.setitem(PAPERS, "toy", Paper("Toy"))

    def write(name, text):
        file = tmp_path / "notebooks" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    write("presets.yaml", "")
    write("toy/fig_1_bytes.ipynb", book("# Bytes\n\n**Question.** How\nmany?\n\nMore.", 'Run("toy/fig_1", globals())'))
    return write


def test_a_notebook_says_its_id_title_and_question(place):
    place("endor/fig02_b.ipynb", book("# B", 'Run("endor/fig02", globals())'))
    place("endor/fig01_a.ipynb", book("# A", 'Run("endor/fig01", globals())'))
    place("00_start.ipynb", book("# Start", "import x", "run = Run('start', globals())"))
    found = catalogue.notebooks()
    assert list(found) == ["start", "endor/fig01", "endor/fig02", "toy/fig_1"]
    assert [each.paper for each in found.values()] == ["start", "endor", "endor", "toy"]
    assert (found["toy/fig_1"].title, found["toy/fig_1"].question) == ("Bytes", "How many?")
    assert catalogue.heading("# Bytes\n\n**Question.** How\nmany?\n\nMore.") == ("Bytes", "How many?", "More.")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", r"new\.ipynb: not a readable notebook"),
        (book("# Twice", 'Run("toy/fig_1", globals())'), r"new\.ipynb: fig_1_bytes\.ipynb has the id 'toy/fig_1', too"),
        (book("# A paper", 'Run("tay/fig_1", globals())'), r"new\.ipynb: unknown paper 'tay'.*toy.*literature\.py"),
    ],
)
def test_a_file_that_cannot_be_listed_is_named(place, text, told):
    place("toy/new.ipynb", text)
    with pytest.raises(UserError, match=told):
        catalogue.notebooks()


KIND = json.dumps(
    {
        "cells": [
            {"cell_type": kind, "metadata": {"tags": tags}, "source": [text]}
            for kind, tags, text in (
                ("markdown", ["figures"], "# A kind of figure\n\n**Question.** Which?"),
                ("markdown", ["fig10"], "## Toy fig. 10\n\n**Question.** How large?\n\nMore."),
                ("markdown", ["fig9"], "## Toy fig. 9\n\n**Question.** How small?"),
                ("code", ["parameters"], "figure = 'fig9'\nsize = None\nrepetitions = 3\nmodel = None"),
                ("code", [], 'run = Run(f"toy/{figure}", globals())'),
                ("markdown", ["fig10"], "## A section of fig. 10 alone"),
            )
        ]
    }
)


def test_a_file_of_several_figures_is_a_notebook_for_each(place):
    """A parameter that is None has the figure's own value; without one the figure has no such parameter."""
    place("toy/kind.ipynb", KIND)
    own = {"toy/fig9": {"own": {"size": 9}}, "toy/fig10": {"own": {"size": 10, "model": "x"}, "quick": {"size": 1}}}
    place("presets.yaml", yaml.safe_dump(own))
    small, large = (catalogue.find(f"toy/{name}") for name in ("fig9", "fig10"))
    assert small.path == large.path
    assert (large.title, large.question) == ("Toy fig. 10", "How large?")
    assert small.parameters == {"size": 9, "repetitions": 3}
    assert large.preset("quick") == {"size": 1, "repetitions": 3, "model": "x"}
    assert small.settings(small.parameters) == {"figure": "fig9", "size": 9, "repetitions": 3}
    cells = catalogue.cells_of(json.loads(KIND)["cells"], "fig10")
    assert [cell["source"][0].split("\n")[0] for cell in cells if cell["cell_type"] == "markdown"] == [
        "## Toy fig. 10",
        "## A section of fig. 10 alone",
    ]
    assert len(catalogue.cells_of(json.loads(KIND)["cells"], "")) == 6


def test_explorers_say_what_they_are(place):
    assert catalogue.explorers() == {}
    place("explore/b.ipynb", book("# Explore: b\n\n**Question.** Which one?\n\nMore."))
    place("explore/a.ipynb", book("no heading"))
    first, second = catalogue.explorers().values()
    assert (second.id, second.title, second.question) == ("explore/b", "Explore: b", "Which one?")
    assert (first.title, first.question) == ("a", "")
    assert (second.parameters, second.preset("quick"), second.paper) == ({}, {}, "explore")


def test_presets_are_read_and_wrong_ones_named(place):
    place("presets.yaml", yaml.safe_dump({"toy/fig_1": {"alone": True, "quick": {"layers": 1}, "paper": None}}))
    found = catalogue.find("toy/fig_1")
    assert (found.alone, found.presets["quick"]) == (True, {"layers": 1})
    with pytest.raises(UserError, match="unknown notebook 'toy/fig_9'; choose from: toy/fig_1"):
        catalogue.find("toy/fig_9")
    for presets, told in (
        ({"toy/fig_1": {"quick": 3}}, r"presets\.yaml: toy/fig_1/quick"),
        ({"toy/fig02": {}}, r"presets\.yaml: there is no notebook toy/fig02"),
    ):
        place("presets.yaml", yaml.safe_dump(presets))
        with pytest.raises(UserError, match=told):
            catalogue.notebooks()


def test_explorers_are_not_run_by_name():
    with pytest.raises(UserError, match=r"explore/bits: explorers are opened by hand, in JupyterLab"):
        catalogue.select(["explore/bits"])

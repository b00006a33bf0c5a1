"""The catalogue: what is wrong with a row is told with the row's name."""

import json
import re

import pytest
import yaml

from toolkit import paths
from toolkit.errors import UserError
from toolkit.evidence import catalogue
from toolkit.evidence.literature import PAPERS, Paper

ROW = {"paper": "toy", "id": "fig01", "slug": "bytes", "title": "Figure 1", "question": "How many?"}


@pytest.fixture
def listed(tmp_path, monkeypatch):
    """`listed(*rows)` replaces the catalogue. There is one notebook, of the row `ROW`, and a paper "toy"."""
    monkeypatch.setattr(paths, "root", lambda: tmp_path)
    monkeypatch.setitem(PAPERS, "toy", Paper("Toy"))
    (tmp_path / "data").mkdir()
    (tmp_path / "notebooks" / "toy").mkdir(parents=True)
    (tmp_path / "notebooks" / "presets.yaml").write_text("")
    (tmp_path / "notebooks" / "toy" / "fig01_bytes.ipynb").write_text("")

    def write(*rows):
        (tmp_path / "data" / "catalogue.yaml").write_text(yaml.safe_dump(list(rows)))

    return write


def without(name):
    return {key: value for key, value in ROW.items() if key != name}


def test_rows_with_and_without_a_notebook(listed):
    listed(ROW, ROW | {"id": "fig02"}, without("paper") | {"id": "start", "file": "toy/fig01_bytes.ipynb"})
    assert list(catalogue.rows()) == ["toy/fig01", "toy/fig02", "start"]
    assert list(catalogue.notebooks()) == ["toy/fig01", "start"]


BROKEN = {
    "no mapping": ("fig01", "row 2 ('fig01'): expected fields such as 'id: fig01'"),
    "no id": (without("id"), "row 2 (toy): id is missing"),
    "no title": (without("title"), "row 2 (toy/fig01): title is missing"),
    "no question": (without("question"), "row 2 (toy/fig01): question is missing"),
    "no slug": (without("slug"), "row 2 (toy/fig01): slug is missing"),
    "a number": (ROW | {"id": 1}, "row 2 (toy/1): id is 1; expected text (in quotes"),
    "a line end": (ROW | {"slug": "bytes\n"}, "row 2 (toy/fig01): slug 'bytes\\n': expected letters, digits, _ and -"),
    "a file elsewhere": (ROW | {"file": "../x.ipynb"}, "row 2 (toy/fig01): file '../x.ipynb': expected letters"),
    "empty": (ROW | {"title": " "}, "row 2 (toy/fig01): title is ' '; expected text"),
    "a list": (ROW | {"paper": ["toy"]}, "row 2 (['toy']/fig01): paper is ['toy']; expected text"),
    "unknown field": (ROW | {"colour": "red"}, "row 2 (toy/fig01): unknown field 'colour'; choose from: paper, id,"),
    "unknown paper": (ROW | {"paper": "tay"}, "row 2 (tay/fig01): unknown paper 'tay'; choose from: endor,"),
    "a path as id": (ROW | {"id": "../fig01"}, "row 2 (toy/../fig01): id '../fig01': expected small letters"),
    "twice": (ROW | {"id": "start"}, "row 2 (toy/start): an earlier row has this id"),
    "another slug": (ROW | {"slug": "byte"}, "fig01_byte.ipynb, but fig01_bytes.ipynb; file and slug must agree"),
    "no such file": (ROW | {"file": "toy/other.ipynb"}, "row 2 (toy/fig01): there is no "),
}


@pytest.mark.parametrize(("row", "told"), BROKEN.values(), ids=BROKEN)
def test_a_broken_row_is_named(listed, row, told):
    listed(ROW | {"id": "start"}, row)
    with pytest.raises(UserError, match=re.escape(told)) as caught:
        catalogue.rows()
    assert str(caught.value).startswith("data/catalogue.yaml: row 2 (")
    assert "\n" not in str(caught.value)


def test_a_catalogue_that_is_no_list(listed, tmp_path):
    (tmp_path / "data" / "catalogue.yaml").write_text("id: fig01")
    with pytest.raises(UserError, match=r"data/catalogue\.yaml is no list"):
        catalogue.rows()


def test_a_notebook_without_a_row_and_a_row_without_a_notebook(listed):
    listed(ROW, ROW | {"id": "fig02"})
    with pytest.raises(UserError, match=r"unknown notebook 'toy/fig09'; choose from: toy/fig01; .* a row in data/cat"):
        catalogue.find("toy/fig09")
    with pytest.raises(UserError, match=r"toy/fig02 has no notebook yet; expected it at .*toy/fig02_bytes\.ipynb"):
        catalogue.find("toy/fig02")


def test_explorers_need_no_row_and_say_what_they_are(listed, tmp_path):
    assert catalogue.explorers() == {}
    (tmp_path / "notebooks" / "explore").mkdir()
    for name, first in {"b": "# Explore: b\n\n**Question.** Which one?\n\nMore.", "a": "no heading"}.items():
        cell = {"cell_type": "markdown", "metadata": {}, "source": [first]}
        (tmp_path / "notebooks" / "explore" / f"{name}.ipynb").write_text(json.dumps({"cells": [cell]}))
    first, second = catalogue.explorers().values()
    assert (second.id, second.title, second.question) == ("explore/b", "Explore: b", "Which one?")
    assert (first.title, first.question) == ("no heading", "")
    assert (second.parameters, second.preset("quick"), second.paper) == ({}, {}, "explore")
    (tmp_path / "notebooks" / "explore" / "c.ipynb").write_text("")
    with pytest.raises(UserError, match=r"c\.ipynb: not a readable notebook"):
        catalogue.explorers()


# each of 13 lists names the one before nine times: 2.5 million million values in 500 bytes
LAUGHS = b"- &a [x]\n" + b"".join(b"- &%c [%s]\n" % (c + 1, b",".join([b"*%c" % c] * 9)) for c in range(97, 110))


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"- id: 2026-01-02", r"'2026-01-02' is read as a date: put it in quotes"),
        (b"- {id: [", r"cannot be read"),
        (b"- ? [a]\n  : b", r"cannot be read"),
        (b"- !!set {a}", r"is read as a set"),
        (b"- !!python/object:os.system {}", r"could not determine a constructor"),
        (b"- id: \xe9", r"'utf-8' codec"),
        (b"[" * 5000, r"nested more than 100 deep"),
        (b"", r"is no list"),
        (b"&a [*a, *a]", r"(nested more than|values)"),
        (LAUGHS, r"more than 4000000 values"),
    ],
)
def test_a_file_that_is_no_catalogue(listed, tmp_path, content, told):
    (tmp_path / "data" / "catalogue.yaml").write_bytes(content)
    with pytest.raises(UserError, match=rf"data/catalogue\.yaml.*{told}") as caught:
        catalogue.rows()
    assert "\n" not in str(caught.value)


def test_presets_are_read(listed, tmp_path):
    listed(ROW)
    presets = {"toy/fig01": {"alone": True, "quick": {"layers": 1}, "paper": None}}
    (tmp_path / "notebooks" / "presets.yaml").write_text(yaml.safe_dump(presets))
    found = catalogue.rows()["toy/fig01"]
    assert (found.paper, found.alone, found.presets["quick"]) == ("toy", True, {"layers": 1})


@pytest.mark.parametrize(
    ("presets", "told"),
    [
        ([1], r"presets\.yaml: .*is not of type 'object'"),
        ({"toy/fig01": [1]}, r"presets\.yaml: toy/fig01: \[1\] is not of type"),
        ({"toy/fig01": {"quick": 3}}, r"presets\.yaml: toy/fig01/quick: 3 is not of type"),
        ({"toy/fig01": {"alone": "yes"}}, r"presets\.yaml: toy/fig01/alone: 'yes' is not of type 'boolean'"),
        ({"toy/fig02": {}}, r"presets\.yaml: toy/fig02 is not in data/catalogue\.yaml"),
        ({"toy/fig01": {"slow": {}}}, "unknown preset of toy/fig01"),
        ({1: {}}, r"presets\.yaml: cannot be read: a key 1: expected text"),
    ],
)
def test_presets_that_are_wrong(listed, tmp_path, presets, told):
    listed(ROW)
    (tmp_path / "notebooks" / "presets.yaml").write_text(yaml.safe_dump(presets))
    with pytest.raises(UserError, match=told):
        catalogue.rows()

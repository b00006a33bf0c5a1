"""A broken row of the catalogue, or of the presets, is refused with its file and its place."""

import pytest
import yaml

from toolkit import paths
from toolkit.errors import UserError
from toolkit.evidence import catalogue

ROW = {"paper": "toy", "id": "fig1", "slug": "x", "title": "Toy fig. 1", "question": "Why?"}
# each of 13 lists names the one before nine times: 2.5 million million values in 500 bytes
LAUGHS = b"- &a [x]\n" + b"".join(b"- &%c [%s]\n" % (c + 1, b",".join([b"*%c" % c] * 9)) for c in range(97, 110))


@pytest.fixture
def listed(tmp_path, monkeypatch):
    """`listed(rows, presets)` replaces the catalogue and the presets, given as values or as the file's bytes."""
    monkeypatch.setattr(paths, "root", lambda: tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "notebooks").mkdir()

    def write(rows, presets=None):
        for value, file in ((rows, "data/catalogue.yaml"), (presets, "notebooks/presets.yaml")):
            content = value if isinstance(value, bytes) else yaml.safe_dump(value).encode()
            (tmp_path / file).write_bytes(content)

    return write


def test_rows_and_presets_as_they_should_be(listed):
    listed([ROW], {"toy/fig1": {"alone": True, "quick": {"layers": 1}, "paper": None}})
    found = catalogue.rows()["toy/fig1"]
    assert (found.paper, found.alone, found.presets["quick"]) == ("toy", True, {"layers": 1})
    listed([ROW])
    assert not catalogue.rows()["toy/fig1"].alone


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        ([ROW | {"id": 3}], r"record number 1: id: 3 is not of type 'string'"),
        ([ROW, {**ROW, "title": ""}], r"record fig1: title: ''"),
        ([{key: value for key, value in ROW.items() if key != "question"}], r"record fig1: .*'question' is a required"),
        ([{key: value for key, value in ROW.items() if key != "slug"}], r"record fig1: "),
        ([ROW | {"sluug": "x"}], r"record fig1: .*'sluug' was unexpected"),
        ([ROW | {"paper": "../toy"}], r"record fig1: paper: '../toy' does not match"),
        ([ROW | {"file": "../../x.ipynb"}], r"record fig1: file"),
        ([ROW | {"slug": "x\n"}], r"record fig1: slug"),
        ([ROW, ROW], r"row toy/fig1: the id is used twice"),
        ([[ROW]], r"record number 1: the record: .* is not of type 'object'"),
        (ROW, r"the whole: .* is not of type 'array'"),
        (b"- id: 2026-01-02", r"'2026-01-02' is read as a date: put it in quotes"),
        (b"- {id: [", r"cannot be read"),
        (b"- ? [a]\n  : b", r"cannot be read"),
        (b"- !!set {a}", r"is read as a set"),
        (b"- !!python/object:os.system {}", r"cannot be read: could not determine a constructor"),
        (b"- id: \xe9", r"cannot be read: 'utf-8' codec"),
        (b"[" * 5000, r"nested more than 100 deep"),
        (b"", r"the whole: None is not of type 'array'"),
        (b"&a [*a, *a]", r"(nested more than|values)"),
        (LAUGHS, r"more than 4000000 values"),
    ],
)  # fmt: skip
def test_a_row_that_is_wrong(listed, rows, told):
    listed(rows)
    with pytest.raises(
        UserError, match=rf"catalogue\.yaml: {told}|catalogue\.yaml: cannot be read: .*{told}"
    ) as caught:
        catalogue.rows()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("presets", "told"),
    [
        ([1], r"presets\.yaml: .*is not of type 'object'"),
        ({"toy/fig1": [1]}, r"presets\.yaml: toy/fig1: \[1\] is not of type"),
        ({"toy/fig1": {"quick": 3}}, r"presets\.yaml: toy/fig1/quick: 3 is not of type"),
        ({"toy/fig1": {"alone": "yes"}}, r"presets\.yaml: toy/fig1/alone: 'yes' is not of type 'boolean'"),
        ({"toy/fig2": {}}, r"presets\.yaml: toy/fig2 is not in data/catalogue\.yaml"),
        ({"toy/fig1": {"slow": {}}}, "unknown preset of toy/fig1"),
        ({1: {}}, r"presets\.yaml: cannot be read: a key 1: expected text"),
    ],
)
def test_presets_that_are_wrong(listed, presets, told):
    listed([ROW], presets)
    with pytest.raises(UserError, match=told):
        catalogue.rows()

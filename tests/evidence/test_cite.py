"""Numbers in pages are those of the kept tables."""

import json

import pytest

from toolkit.errors import UserError
from toolkit.evidence import cite

TABLE = """method,place,seconds,seconds_low,seconds_high,share,bits
dense,disk,2.0,1.5,2.5,0.5,16
endor packed,disk,1.25,1.0,1.5,0.25,9
endor packed,dram,0.5,0.5,0.5,,9
"""
ADDRESSES = {
    "toy/one seconds method=dense": "2.00",
    "toy/one seconds 'method=endor packed' place=disk .1f": "1.2",  # half to even
    "toy/one share method=dense .0%": "50%",
    "toy/one bits method=dense .0f": "16",
    "toy/one share 'method=endor packed' .2f": "0.25",  # the other row has no value
    "toy/one seconds bits=16 over bits=9.0 place=dram .0f": "4",
    "toy/one seconds bits=16 over bits=9.0 place=dram .1f range": "4.0 (3.0–5.0)",
    "toy/one/comparison published claim=x": "1.50",
    "toy/one/card value 'label=endor, packed' over label=dense .1f": "0.5",
    "scores n paper=toy .0f": "7",
    "other:scores n paper=toy .0f": "8",
    "toy/one headline.gain": "It is 2.0 times as fast.",
    "half": "50%",
    "hermes/claims value id=fig09-speedup .1f": "75.2",
}
NAMES = {"machine": "here", "half": "toy/one share method=dense .0%"}
WRONG = {
    "toy/two seconds method=dense": "toy/two: nothing is kept there",
    "toy/one second method=dense": "method=dense: column 'second'; .*did you mean 'seconds'",
    "toy/one seconds place=disk": "2 rows have a value; expected one",
    "toy/one headline.cost": "headline 'cost'; choose from: gain",
    "hal": "unknown cell 'hal'; .*did you mean 'half'",
}


@pytest.fixture
def reference(tmp_path):
    for machine, n in (("here", 7), ("other", 8)):
        folder = tmp_path / machine / "toy" / "one"
        folder.mkdir(parents=True)
        (folder / "table.csv").write_text(TABLE)
        (folder / "comparison.csv").write_text("claim,published\nx,1.5\ny,2\n")
        bars = {"dense": 8, "endor, packed": 4}
        meta = {"headline": {"gain": "It is 2.0 times as fast."}, "card": {"bars": bars}}
        (folder / "meta.json").write_text(json.dumps(meta))
        (tmp_path / machine / "scores.csv").write_text(f"paper,n\ntoy,{n}\n")
    return tmp_path


def test_an_address_leads_to_one_number_or_is_refused(reference):
    assert {cell: cite.value(cell, reference, NAMES) for cell in ADDRESSES} == ADDRESSES
    for cell, words in WRONG.items():
        with pytest.raises(UserError, match=words):
            cite.value(cell, reference, NAMES)


def test_a_notebook_has_a_machine_of_its_own_or_that_of_all():
    names = NAMES | {"toy/one": "there"}
    found = {
        cell: cite.address(cell, names)[0] for cell in ("half", "toy/one/card value", "toy/two x", "else:toy/one x")
    }
    assert found == {"half": "there", "toy/one/card value": "there", "toy/two x": "here", "else:toy/one x": "else"}
    assert cite.address("half", cite.of_these_results(names))[0] == "."


def test_a_refreshed_page_differs_in_its_numbers_alone(reference, monkeypatch):
    monkeypatch.setattr(cite, "read_names", lambda: NAMES)
    page = reference / "page.md"
    page.write_text(
        "A <!--cell half-->9%<!--/--> b <!-- a remark --> <!--cell toy/one bits method=dense .0f-->16<!--/-->.\n"
    )
    assert cite.citations(page)[0] == ("half", "9%")
    assert cite.refresh(page, reference) == 1
    assert page.read_text() == (
        "A <!--cell half-->50%<!--/--> b <!-- a remark --> <!--cell toy/one bits method=dense .0f-->16<!--/-->.\n"
    )
    assert cite.refresh(page, reference) == 0


def test_the_numbers_of_pages_are_those_of_the_kept_tables():
    """README, docs and gallery; the message names the machine that a number is from."""
    reference = cite.reference_dir()
    names = cite.read_names()
    stale = [
        f"{page.name}: {cell} of {cite.address(cell, names)[0]}: {text} here, {kept} kept"
        for page in cite.pages()
        for cell, text in cite.citations(page)
        if (kept := cite.value(cell, reference, names)) != text
    ]
    assert stale == [], "run `python -m toolkit.evidence.cite`"


def test_every_named_cell_is_cited_and_has_a_value():
    reference = cite.reference_dir()
    names = cite.read_names()
    cited = {cell for page in cite.pages() for cell, _ in cite.citations(page)}
    machines = {name: machine for name, machine in names.items() if name == "machine" or "/" in name}
    assert names.keys() - machines <= cited
    assert all((reference / machine / name.removeprefix("machine")).is_dir() for name, machine in machines.items())


def test_no_line_begins_with_a_cell():
    """Markdown would take it for a block of HTML, and end the paragraph there."""
    lines = [line for page in cite.pages() for line in page.read_text(encoding="utf-8").splitlines()]
    assert [line for line in lines if line.lstrip().startswith("<!--cell")] == []

"""Kept machines side by side, by two made up and worked by hand, and from what is kept."""

import json
import math

import pandas as pd
import pytest

from toolkit.evidence.machines import BYTES, PAGE, PAPERS, QUALITY, TIMES, compare_machines, spread, write_machines
from toolkit.evidence.reference import reference_dir

CAPTION = "ms a layer of opt, measured"


@pytest.fixture
def keep(tmp_path):
    """`keep(machine, id, table, bars, **parameters)` leaves results as they are kept of a machine."""

    def write(machine, id, table, bars=None, caption=CAPTION, **parameters):
        folder = tmp_path / machine / id
        folder.mkdir(parents=True)
        pd.DataFrame(table).to_csv(folder / "table.csv", index=False)
        card = bars and {"caption": caption, "bars": bars}
        meta = {"id": id, "parameters": parameters, "card": card, "cpu": machine, "finished": "2026-01-02T03:04:05Z"}
        (folder / "meta.json").write_text(json.dumps(meta | {"git": "0123456789abcdef"}))

    return write


def test_spreads_by_hand():
    assert spread([2.0, -3.0, 0.0, 0.0, 1.0], [3.0, -2.0, 0.0, 4.0, 1.0]).tolist() == [0.5, 0.5, 0.0, math.inf, 0.0]


def test_each_number_goes_to_the_group_of_its_evidence_and_unit(keep, tmp_path):
    """Rows answer to each other by their keys, whatever their order; a row that one machine lacks counts nowhere."""
    rows = {"method": ["dense", "endor", "csr"], "evidence": "measured", "seconds": [2.0, 1.0, 9.0]}
    keep("a", "endor/fig02", rows | {"nbytes": [100, 50, 70], "perplexity": [20.0, 40.0, 1.0]})
    other = {"method": ["endor", "dense"], "evidence": "measured", "seconds": [2.0, 3.0]}
    keep("b", "endor/fig02", other | {"nbytes": [50, 100], "perplexity": [41.0, 20.0]})
    modelled = {"method": ["dense"], "evidence": "modelled", "profile": "paper", "seconds": [5.0]}
    for machine in ("a", "b"):
        keep(machine, "endor/fig03", modelled)
    found = compare_machines(tmp_path).groups.set_index("group")
    assert found["numbers"].to_dict() == {PAPERS: 1, BYTES: 2, QUALITY: 2, TIMES: 2}
    assert found.loc[[PAPERS, BYTES], "equal"].tolist() == [1.0, 1.0]
    assert found.loc[TIMES, ["equal", "median", "largest", "where"]].tolist() == [0, 0.75, 1.0, "endor/fig02, seconds"]
    assert found.loc[QUALITY, ["equal", "near", "largest"]].tolist() == [0.5, 0.5, 1 / 40]


def test_only_runs_with_the_same_parameters_are_compared(keep, tmp_path):
    table = {"method": ["dense"], "evidence": "measured", "seconds": [1.0]}
    for machine, layers in {"a": 1, "b": 2, "c": 2}.items():
        keep(machine, "endor/fig02", table, {"dense": 1.0 + layers, "endor": 1.0}, layers=layers)
    (card,) = compare_machines(tmp_path).cards
    assert card.values == {"dense": {"b": 3.0, "c": 3.0}, "endor": {"b": 1.0, "c": 1.0}}


def test_ratios_are_taken_on_each_machine(keep, tmp_path):
    table = {"method": ["dense"], "evidence": "measured", "seconds": [1.0]}
    keep("a", "endor/fig02", table, {"dense": 10.0, "endor *": 5.0, "csr": 1.0})
    keep("b", "endor/fig02", table, {"dense": 20.0, "endor": 8.0})
    for machine in ("a", "b"):  # no times
        keep(machine, "endor/fig03", table, {"dense": 1.0, "endor": 0.5}, "bytes over dense bytes, measured")
    found = compare_machines(tmp_path)
    (card,) = found.cards
    assert card.ratios == {"endor": {"a": 0.5, "b": 0.4}}
    assert found.clock == pytest.approx((1.0 + 0.6) / 2)
    assert found.ratio == pytest.approx(0.25)
    page = write_machines(tmp_path).read_text()
    assert "median spread of times and rates over machines is 80 %, that of the ratios within a machine 25 %" in page


def test_one_machine_is_compared_with_none(keep, tmp_path):
    keep(
        "a",
        "endor/fig02",
        {"method": ["dense"], "evidence": "measured", "seconds": [1.0]},
        {"dense": 1.0, "endor": 2.0},
    )
    found = compare_machines(tmp_path)
    assert found.groups.empty
    assert found.cards == []
    assert "endor" not in write_machines(tmp_path).read_text()


def test_the_kept_page_is_made_from_what_is_kept(tmp_path):
    kept = (reference_dir() / PAGE).read_text(encoding="utf-8")
    for machine in reference_dir().glob("*/"):
        (tmp_path / machine.name).symlink_to(machine)
    assert write_machines(tmp_path).read_text(encoding="utf-8") == kept

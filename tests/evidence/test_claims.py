"""Published numbers: their files are read strictly, whole, consistent, and as the papers have them."""

import pandas as pd
import pytest

from toolkit import paths
from toolkit.errors import UserError
from toolkit.evidence import claims, literature
from toolkit.evidence.catalogue import notebooks
from toolkit.evidence.claims import KINDS, UNITS, read_claims
from toolkit.machines.hardware import profiles

RECORD = {
    "id": "x-1",
    "figure": "toy/fig1",
    "kind": "prediction",
    "quantity": "size over dense",
    "value": 0.5,
    "unit": "ratio",
    "conditions": "half",
    "section": "4.1",
}


def test_a_broken_file_is_refused_with_its_name_and_record(publish):
    for records, words in (
        ([RECORD | {"kind": "guess"}], "guess"),
        ([RECORD, RECORD], "x-1"),
        ([RECORD | {"valeu": 3}], "valeu"),
        ([RECORD | {"beside": "x-2"}, RECORD | {"id": "x-2", "figure": "toy/fig2"}], "x-1: beside is 'x-2'"),
    ):
        publish(*records)
        with pytest.raises(UserError, match=rf"toy\.yaml.*{words}"):
            claims.claims("toy")


PAPERS = sorted(file.stem for file in (paths.root() / "data" / "claims").iterdir())
# typed from the papers, apart from the files
SPOT_VALUES = [
    ("endor/tab_e2e-llama-remapped-direct", 24, "s"),
    ("endor/fig04-bitmap-int8", 42, "MB"),
    ("flash/tab03-opt-metal-m2-all-total", 305, "ms"),
    ("flash/tab03-repeated-persimmon-cpu-all-compute-deviation", 24.76, "ms"),
    ("spqr/fig4_3-a100-ptcsr-median", 0.0121, "s"),
    ("spqr/tab1_1-softmax-bytes", 262e3, "bytes"),
    ("hermes/fig10-llama70b", 13.75, "tokens/s"),
    ("hermes/fig17-batch-16", 24.4, "percent"),
    ("corm/tab02-deepseek-corm-mmlu", 43.7, "percent"),
    ("hermes/fig14-tabii-tfaw", 26, "cycles"),
    ("beyond/lossless-zipnn-ratio", 0.67, "ratio"),
    ("corm/fig07-deepseek-over-mixtral-offload-128", 1.27, "speedup"),
]


@pytest.fixture(scope="module")
def records() -> pd.DataFrame:
    """Every record of every paper, by `<paper>/<id>`."""
    table = pd.concat(claims.claims(paper).assign(paper=paper) for paper in PAPERS)
    table.index = table["paper"] + "/" + table["id"]
    assert table.index.is_unique
    return table


def test_records_are_whole_and_as_the_papers_have_them(records):
    assert set(PAPERS) <= literature.PAPERS.keys()
    assert set(records["figure"]) <= notebooks().keys()
    assert [id for id, figure in records["figure"].items() if not id.startswith(f"{figure}-")] == []
    assert set(records["unit"]) == set(UNITS)
    assert records.loc[records["unit"] == "percent", "value"].between(0, 100).all()
    assert set(records.loc[records["value"] < 0, "unit"]) == {"points"}
    for paper, rows in records.groupby("paper"):
        assert set(rows["kind"]) == set(KINDS) - ({"input"} if paper == "beyond" else set()), paper
    assert [(claim, *records.loc[claim, ["value", "unit"]]) for claim, _, _ in SPOT_VALUES] == SPOT_VALUES


def test_inputs_are_what_the_profiles_sources_name_and_nothing_else(records):
    """Both ways: what a profile was derived from is an input, and each input is named by a source or says its use."""
    named = {
        f"{machine.paper}/{id}"
        for machine in profiles().values()
        for source in machine.sources.values()
        for id in source.claims
    }
    inputs = records[(records["kind"] == "input") & records["input_of"].isna()]
    assert set(records.loc[records["input_of"].notna(), "kind"]) == {"input"}
    counted = (inputs["paper"] + "/" + inputs["same_as"].fillna(inputs["id"])).unique()
    assert named == set(counted)


def test_a_number_that_no_notebook_has_says_why():
    listed = [claim for paper in PAPERS for claim in read_claims(paper) if claim.kind in ("prediction", "arithmetic")]
    assert not [claim.id for claim in listed if not (claim.column or claim.reason.get("not run"))]

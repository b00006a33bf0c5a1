import pandas as pd
import pytest
import yaml

from toolkit import paths
from toolkit.errors import UserError
from toolkit.evidence import claims
from toolkit.evidence.claims import COLUMNS, compare, compare_machines

RECORD = {
    "id": "x-1",
    "figure": "toy/fig1",
    "quantity": "size over dense",
    "value": 0.5,
    "unit": "ratio",
    "conditions": "half",
    "section": "4.1",
    "column": "ratio",
    "where": {"format": "endor", "sparsity": 0.5},
}
TABLE = pd.DataFrame(
    {"format": ["endor", "csr"], "sparsity": [0.5, 0.5], "ratio": [0.54, 1.0], "evidence": ["measured", "modelled"]}
)


@pytest.fixture
def publish(tmp_path, monkeypatch):
    monkeypatch.setattr(paths, "root", lambda: tmp_path)
    (tmp_path / "data" / "claims").mkdir(parents=True)

    def write(*records: dict) -> None:
        claims.claims.cache_clear()
        (tmp_path / "data" / "claims" / "toy.yaml").write_text(yaml.safe_dump(list(records)))

    yield write
    claims.claims.cache_clear()


@pytest.mark.parametrize(
    ("tolerance", "verdict"), [(None, "within tolerance"), (0.09, "within tolerance"), (0.07, "differs")]
)
def test_verdict_is_by_relative_tolerance(publish, tolerance, verdict):
    publish(RECORD if tolerance is None else RECORD | {"tolerance": tolerance})
    row = compare(TABLE, "toy/fig1").iloc[0]
    assert (row["published"], row["ours"], row["evidence"], row["verdict"]) == (0.5, 0.54, "measured", verdict)
    assert row["ratio"] == pytest.approx(1.08)


@pytest.mark.parametrize(("slack", "verdict"), [(0.6, "within tolerance"), (0.5, "differs")])
def test_a_published_zero_has_an_absolute_tolerance(publish, slack, verdict):
    publish(RECORD | {"value": 0, "slack": slack})
    assert compare(TABLE, "toy/fig1")["verdict"].tolist() == [verdict]


@pytest.mark.parametrize(
    ("bound", "value", "verdict"),
    [
        ("at_most", 0.9, "within tolerance"),
        ("at_most", 0.4, "differs"),
        ("at_least", 0.4, "within tolerance"),
        ("at_least", 0.9, "differs"),
        ("at_most", 0, "differs"),
    ],
)
def test_a_published_limit_is_met_from_its_open_side(publish, bound, value, verdict):
    publish(RECORD | {"bound": bound, "value": value})
    assert compare(TABLE, "toy/fig1")["verdict"].tolist() == [verdict]


@pytest.mark.parametrize(
    ("value", "beside", "verdict"),
    [
        (0.54, 1, "within tolerance"),
        (0.3, 1, "same shape"),
        (0.3, 0.4, "differs"),
        (1.2, 1, "differs"),
        (0.3, 0.54, "differs"),
    ],
)
def test_another_value_on_the_same_side_of_a_number_has_the_same_shape(publish, value, beside, verdict):
    publish(RECORD | {"value": value, "beside": beside})
    assert compare(TABLE, "toy/fig1")["verdict"].tolist() == [verdict]


SMALL = {
    "where": {"format": "endor", "model": "large"},
    "stand_in": {"format": "endor"},
    "beside": "x-2",
    "value": 0.54,
}
BESIDE = {"where": {"format": "csr", "model": "large"}, "stand_in": {"format": "csr"}, "beside": "x-1", "id": "x-2"}


@pytest.mark.parametrize(("other", "verdict"), [(0.9, "same shape"), (0.2, "differs"), (0.54, "differs")])
def test_a_stand_in_shows_the_shape_at_most(publish, other, verdict):
    publish(RECORD | SMALL, RECORD | BESIDE | {"value": other})
    found = compare(TABLE.assign(model="small"), "toy/fig1")
    assert found["ours"].tolist() == [0.54, 1.0]
    assert found["stand_in"].all()
    assert found["verdict"].tolist() == [verdict] * 2
    exact = compare(TABLE.assign(model="large"), "toy/fig1")
    assert not exact["stand_in"].any()
    assert exact["verdict"][0] == "within tolerance"


def test_a_stand_in_whose_neighbour_was_not_run_differs(publish):
    publish(RECORD | SMALL, RECORD | BESIDE)
    assert compare(TABLE.iloc[:1].assign(model="small"), "toy/fig1")["verdict"].tolist() == ["differs", "not run"]


def test_a_claim_without_a_row_of_ours_is_not_run(publish):
    publish(RECORD | {"where": {"format": "zstd"}}, {k: v for k, v in RECORD.items() if k != "where"} | {"id": "x-2"})
    assert compare(TABLE, "toy/fig1")["verdict"].tolist() == ["not run", "not run"]
    assert compare(TABLE, "toy/fig2").empty


def test_a_claim_that_two_rows_answer_is_refused(publish):
    publish(RECORD | {"where": {"sparsity": 0.5}})
    with pytest.raises(UserError, match="x-1: 2 rows"):
        compare(TABLE, "toy/fig1")


@pytest.mark.parametrize(
    ("records", "words"),
    [
        ([{k: v for k, v in RECORD.items() if k != "section"}], "section"),
        ([RECORD | {"unit": "furlong"}], "furlong"),
        ([RECORD, RECORD], "x-1"),
        ([RECORD | {"valeu": 3}], "valeu"),
        ([RECORD | {"beside": "x-9"}], "x-1: beside is 'x-9'; expected an id of its figure"),
        ([RECORD | {"beside": "x-2"}, RECORD | {"id": "x-2", "figure": "toy/fig2"}], "x-1: beside is 'x-2'"),
        ([RECORD | {"stand_in": {"format": "csr"}}], "x-1: a stand_in"),
    ],
)
def test_a_broken_file_is_refused_with_its_name_and_record(publish, records, words):
    publish(*records)
    with pytest.raises(UserError, match=rf"toy\.yaml.*{words}"):
        claims.claims("toy")


def test_each_machine_is_compared_by_itself_and_by_what_was_measured(publish):
    publish(RECORD, RECORD | {"id": "x-2", "where": {"format": "csr"}})
    rows = [
        ("paper", "endor", 0.5, "modelled"),
        ("here", "endor", 0.9, "modelled"),
        ("here", "endor", 0.52, "measured"),
    ]
    table = pd.DataFrame(rows, columns=["profile", "format", "ratio", "evidence"]).assign(sparsity=0.5)
    found = compare_machines(table, "toy/fig1")[["profile", "claim", "ours", "evidence", "verdict"]]
    assert found.astype(object).fillna("").to_numpy().tolist() == [
        ["paper", "x-1", 0.5, "modelled", "within tolerance"],
        ["paper", "x-2", "", "", "not run"],
        ["here", "x-1", 0.52, "measured", "within tolerance"],
    ]


def test_a_figure_without_numbers_has_an_empty_comparison(publish):
    publish(RECORD)
    assert compare(TABLE, "toy/fig2").columns.tolist() == COLUMNS
    assert compare_machines(TABLE.assign(profile="paper"), "toy/fig2").empty


def test_the_projects_own_claims_are_valid():
    files = sorted((paths.root() / "data" / "claims").glob("*.yaml"))
    assert files
    for file in files:
        assert len(claims.claims(file.stem))

"""Verdicts and scores, each rule by a hand-worked example."""

import math

import pandas as pd
import pytest

from toolkit.errors import UserError
from toolkit.evidence.comparison import compare, group, verdict_table
from toolkit.evidence.scores import count_verdicts, omissions, prediction_words, score, score_sentence

RECORD = {
    "id": "x-1",
    "figure": "toy/fig1",
    "kind": "prediction",
    "quantity": "size over dense",
    "value": 0.5,
    "unit": "ratio",
    "conditions": "half",
    "section": "4.1",
    "column": "ratio",
    "where": {"format": "endor", "sparsity": 0.5},
    "reason": {"measured": "rounded"},
}
TABLE = pd.DataFrame(
    {"format": ["endor", "csr"], "sparsity": [0.5, 0.5], "ratio": [0.54, 1.0], "evidence": ["measured", "modelled"]}
)


BESIDE_1, LIMIT_1 = {"value": 1.67, "beside": 1}, {"bound": "at_most", "value": 1, "beside": 1}
LARGE = {"where": {"format": "endor", "model": "large"}, "stand_in": {"format": "endor"}}
UP_TO, TWICE = {"bound": "up_to", "value": 20, "beside": 1}, {"bound": "at_least", "value": 2, "beside": 1}
# changes of the record, then our value for each verdict
VERDICTS = [
    ({}, {"within tolerance": [0.54]}),  # 8 % off
    ({"tolerance": 0.09}, {"within tolerance": [0.54]}),
    ({"tolerance": 0.07}, {"differs": [0.54]}),
    ({"value": 0, "slack": 0.6}, {"within tolerance": [0.54]}),  # nothing is relative to zero
    ({"value": 0, "slack": 0.5}, {"differs": [0.54]}),
    # a limit is open on one side; on the other it has no slack, though a value would allow 2 %
    ({"bound": "at_most", "value": 0.54}, {"within tolerance": [0.3, 0.54], "differs": [0.55]}),
    ({"bound": "at_least", "value": 0.54}, {"within tolerance": [0.54, 0.9], "differs": [0.53]}),
    ({"bound": "at_most", "value": 0}, {"differs": [0.54]}),
    # at least twice as fast: 1.9 times is 0.9 of that effect, 1.1 times 0.1
    (TWICE, {"same effect": [1.9], "direction only": [1.1], "differs": [0.9]}),
    # an upper end is reached or missed like a value, and no bound that a slow-down satisfies: 13 / 19 = 0.68
    (
        UP_TO,
        {"within tolerance": [19, 21.5], "same effect": [14.0], "direction only": [13.7], "differs": [22.5, 0.8, 1]},
    ),
    # the same effect is two thirds to one and a half of the published one: 0.45 / 0.67 = 0.672, 1.01 / 0.67 = 1.507
    (
        BESIDE_1,
        {
            "within tolerance": [1.54],
            "same effect": [1.45, 2.00],
            "direction only": [1.44, 2.01],
            "differs": [1.0, 0.9, 0.0, -0.5],
        },
    ),
    ({"value": 5, "beside": 1}, {"direction only": [12.84]}),  # twelve times as fast is not five times
    (LARGE | LIMIT_1, {"direction only": [0.8], "differs": [1.01]}),  # a limit that a stand-in keeps
]


@pytest.fixture
def verdict(publish):
    """The verdict on one claim, `RECORD` with changes, when ours is `ours`."""

    def judge(ours: float, columns: dict | None = None, **changes: object) -> str:
        publish(RECORD | changes)
        table = pd.DataFrame([{"format": "endor", "sparsity": 0.5, "ratio": ours, "evidence": "measured"}])
        return compare(table.assign(**(columns or {})), "toy/fig1")["verdict"].item()

    return judge


def test_verdicts_by_hand(verdict):
    for changes, cases in VERDICTS:
        found = {ours: verdict(ours, **changes) for values in cases.values() for ours in values}
        assert found == {ours: expected for expected, values in cases.items() for ours in values}, changes


def test_a_ratio_and_its_inverse_get_the_same_verdict(verdict):
    for ours in (1.43, 1.46, 1.99, 2.02, 0.9):
        as_speedup = verdict(ours, value=1.67, beside=1, tolerance=1e-6)
        assert as_speedup == verdict(1 / ours, value=1 / 1.67, beside=1, tolerance=1e-6), ours


def test_a_row_says_what_was_compared_and_why_it_differs(publish):
    publish(RECORD | {"tolerance": 0.07, "worded": True})
    row = compare(TABLE, "toy/fig1").iloc[0]
    assert (row["published"], row["ours"], row["evidence"], row["verdict"]) == (0.5, 0.54, "measured", "differs")
    assert (row["ratio"], row["reason"]) == (pytest.approx(1.08), "rounded")
    assert row["conditions"] == "half; in words there"
    disturbed = compare(TABLE.assign(disturbed=[0.5, None]), "toy/fig1").iloc[0]
    assert (disturbed["ours"], disturbed["verdict"]) == (0.54, "not run")
    assert disturbed["reason"].startswith("other work disturbed the measurement")


def test_an_effect_within_the_spread_is_a_sign_at_most(verdict, publish):
    """The range of runs, or two standard errors a side: 20 and 24 leave 0.4 between them where the error is 0.9."""
    for low, expected in ((1.1, "same effect"), (1.0, "direction only"), (0.8, "direction only")):
        spread = {"ratio_low": low, "ratio_high": 1.6}
        assert verdict(1.5, spread, **BESIDE_1) == expected
        assert verdict(1.5, spread | {"evidence": "modelled"}, **BESIDE_1) == "same effect"  # a model has no runs
    where = {name: {"where": {"method": name}, "column": "value"} for name in ("dense", "pruned")}
    publish(
        RECORD | where["dense"] | {"value": 9.0, "beside": "x-2"},
        RECORD | where["pruned"] | {"id": "x-2", "value": 11.0, "beside": "x-1"},
    )
    table = pd.DataFrame({"method": ["dense", "pruned"], "value": [20.0, 24.0]})
    for error, expected in ((0.9, "same effect"), (1.1, "direction only")):
        assert compare(table.assign(standard_error=error), "toy/fig1")["verdict"].tolist() == [expected] * 2


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({"chance": 79.0}, "differs"),  # 80 % where guessing gives 79
        ({"chance": float("nan")}, "same effect"),
        ({"chance": 60.0, "standard_error": 11.0}, "differs"),  # 58 to 102
    ],
)
def test_what_is_no_more_than_chance_shows_no_effect(publish, more, expected):
    """Published 95 % beside 86; ours 80 beside 74: an effect of 0.77 of the published one."""
    record = RECORD | {"column": "value", "value": 95, "unit": "percent", "where": {"row": "paper's"}}
    record |= {"stand_in": {"row": "closest"}}
    publish(record | {"beside": "x-2"}, record | {"id": "x-2", "value": 86, "where": {"row": "third"}, "beside": "x-1"})
    table = pd.DataFrame({"row": ["closest", "third"], "value": [80.0, 74.0], "evidence": "measured"})
    row = compare(table.assign(**more), "toy/fig1").iloc[0]
    assert row["verdict"] == expected
    assert row["reason"] == (f"chance alone gives {more['chance']:.3g}" if expected == "differs" else "rounded")


SMALL = {
    "where": {"format": "endor", "model": "large"},
    "stand_in": {"format": "endor"},
    "beside": "x-2",
    "value": 0.54,
}
BESIDE = {"where": {"format": "csr", "model": "large"}, "stand_in": {"format": "csr"}, "beside": "x-1", "id": "x-2"}


@pytest.mark.parametrize(("other", "expected"), [(0.9, "same effect"), (0.7, "direction only"), (0.2, "differs")])
def test_a_stand_in_shows_the_same_effect_at_best(publish, other, expected):
    """Ours are 0.54 beside 1, an effect of 0.85; 0.9 / 0.54 - 1 is 0.67, 0.7 / 0.54 - 1 is 0.30."""
    publish(RECORD | SMALL, RECORD | BESIDE | {"value": other})
    found = compare(TABLE.assign(model="small"), "toy/fig1")
    assert found["ours"].tolist() == [0.54, 1.0]
    assert found["stand_in"].all()
    assert found["verdict"].tolist() == [expected] * 2
    exact = compare(TABLE.assign(model="large"), "toy/fig1")
    assert not exact["stand_in"].any()
    assert exact["verdict"][0] == "within tolerance"
    alone = compare(TABLE.iloc[:1].assign(model="small"), "toy/fig1")
    assert alone["verdict"].tolist() == ["differs", "not run"]


def test_a_claim_without_a_number_of_ours_is_not_run(publish):
    publish(RECORD | {"where": {"format": "zstd"}}, {k: v for k, v in RECORD.items() if k != "where"} | {"id": "x-2"})
    assert compare(TABLE, "toy/fig1")["verdict"].tolist() == ["not run", "not run"]
    assert compare(TABLE, "toy/fig2").empty
    publish(RECORD)
    assert compare(TABLE.assign(ratio=math.nan), "toy/fig1")["verdict"].tolist() == ["not run"]


def test_a_claim_that_two_rows_answer_is_refused(publish):
    publish(RECORD | {"where": {"sparsity": 0.5}})
    with pytest.raises(UserError, match="x-1: 2 rows"):
        compare(TABLE, "toy/fig1")


MACHINES = pd.DataFrame(
    [
        ("paper", "endor", 0.5, "modelled"),
        ("second", "endor", 0.4, "modelled"),
        ("this-machine", "endor", 0.9, "modelled"),
        ("this-machine", "endor", 0.52, "measured"),
    ],
    columns=["profile", "format", "ratio", "evidence"],
).assign(sparsity=0.5)


def test_each_machine_is_compared_by_itself_and_by_what_was_measured(publish):
    publish(RECORD, RECORD | {"id": "x-2", "where": {"format": "csr"}})
    found = compare(MACHINES, "toy/fig1", MACHINES.iloc[:1].assign(ratio=0.7))
    shown = found[["profile", "claim", "ours", "null", "evidence", "verdict"]]
    assert compare(MACHINES.assign(ratio_low=0.3, ratio_high=1), "toy/fig1")["ours_low"].tolist()[:3] == [0.3] * 3
    assert shown.astype(object).fillna("").to_numpy().tolist() == [
        ["paper", "x-1", 0.5, 0.7, "modelled", "within tolerance"],
        ["second", "x-1", 0.4, "", "modelled", "differs"],
        ["this-machine", "x-1", 0.52, "", "measured", "within tolerance"],
        ["", "x-2", "", "", "", "not run"],
    ]
    # that of the claim is of measured numbers
    assert found["reason"].fillna("").tolist() == ["", "", "", "no row of this run answers to it"]
    scored = score(found)  # every machine of the paper and no other
    assert (scored["n"], scored["largest_error"]) == (2, pytest.approx(0.2))


def test_a_modelled_prediction_without_a_machine_is_refused(publish):
    publish(RECORD)
    table = TABLE.assign(evidence="modelled")
    with pytest.raises(UserError, match="x-1 is modelled for no machine"):
        score(compare(table, "toy/fig1"))
    publish(RECORD | {"machine": "any"})
    assert score(compare(table, "toy/fig1"))["n"] == 1


def test_limits_and_stand_ins_stay_out_of_the_score_and_are_counted(publish):
    """Another machine than the paper's, or another model, is a stand-in; x-3 and x-4 are one quantity, not run."""
    missing = {"where": {"format": "zstd"}}
    publish(
        RECORD,
        RECORD | {"id": "x-2", "bound": "at_most"},
        RECORD | missing | {"id": "x-3"},
        RECORD | missing | {"id": "x-4", "same_as": "x-3"},
    )
    found = compare(MACHINES, "toy/fig1")
    assert group(found).tolist() == ["values"] * 2 + ["stand-ins"] + ["limits"] * 2 + ["stand-ins"] + ["values"] * 2
    assert score(found)["n"] == 2
    assert omissions(found) == {"limits": 2, "stand_ins": 2, "not_run": 1, "quantities": 3}


def test_a_quantity_counts_once_by_the_worst_of_its_records(publish):
    """A time of 10 and its speed-up of 2: ours are 10.5 (5 % off) and 1.7 (15 % off); the null model's 12 and 1.9."""
    time = {"column": "ratio", "where": {"format": "time"}, "value": 10.0}
    speedup = {"id": "x-2", "same_as": "x-1", "where": {"format": "speedup"}, "value": 2.0, "beside": 1}
    limit = {"id": "x-3", "where": {"format": "limit"}, "value": 3.0, "bound": "at_most"}
    given = {"id": "x-4", "kind": "input", "where": {"format": "given"}, "value": 1.0}
    constant = {"id": "x-5", "kind": "context", "where": {"format": "given"}, "value": 1.0}
    publish(RECORD | time, RECORD | speedup, RECORD | limit, RECORD | given, RECORD | constant)
    table = pd.DataFrame({"format": ["time", "speedup", "limit", "given"], "ratio": [10.5, 1.7, 1.0, 1.0]})
    table = table.assign(profile="paper", evidence="modelled")
    found = compare(table, "toy/fig1", table.assign(ratio=[12.0, 1.9, 1.0, 1.0]))
    verdicts = ["within tolerance", "same effect", "within tolerance", "", "within tolerance"]
    assert found["verdict"].fillna("").tolist() == verdicts
    assert count_verdicts(found) == {
        "prediction": {"same effect": 1},
        "prediction, limits": {"within tolerance": 1},
    }
    errors = {"n": 1, "median_error": 0.15, "largest_error": 0.15, "largest": "x-2", "null_n": 1}
    errors |= {"null_median_error": 0.2, "null_largest_error": 0.2, "same_median_error": 0.15}
    assert score(found) == pytest.approx(errors | {"same_largest_error": 0.15})
    expected = "1 prediction, off by 15% (median) and 15% (at most, size over dense: half), where bytes over "
    expected += "bandwidth and nothing else "
    assert prediction_words(found) == expected + "are off by 20% and 20%"
    assert score_sentence(found).startswith("prediction: 1 same effect; prediction, limits: 1 within tolerance.")
    shown = verdict_table(found)
    assert shown["verdict"].tolist() == verdicts
    assert [reason[:20] for reason in shown["reason"]] == ["", "", "", "the model was fitted", ""]
    measured = compare(table.assign(evidence="measured"), "toy/fig1")
    assert measured["verdict"].tolist()[3] == "within tolerance"  # a measurement is fitted to nothing

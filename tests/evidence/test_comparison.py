"""Verdicts and scores, each rule by a hand-worked example."""

import math

import pandas as pd
import pytest

from toolkit.errors import UserError
from toolkit.evidence.comparison import (
    COLUMNS,
    compare,
    count_verdicts,
    group,
    omissions,
    prediction_words,
    score,
    score_sentence,
    verdict_table,
)

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


@pytest.fixture
def verdict(publish):
    """The verdict on one claim, `RECORD` with changes, when ours is `ours`."""

    def judge(ours: float, columns: dict | None = None, **changes: object) -> str:
        publish(RECORD | changes)
        table = pd.DataFrame([{"format": "endor", "sparsity": 0.5, "ratio": ours, "evidence": "measured"}])
        return compare(table.assign(**(columns or {})), "toy/fig1")["verdict"].item()

    return judge


def test_what_other_work_disturbed_has_no_verdict(publish):
    publish(RECORD)
    row = compare(TABLE.assign(disturbed=[0.5, None]), "toy/fig1").iloc[0]
    assert (row["ours"], row["verdict"]) == (0.54, "not run")
    assert row["reason"].startswith("other work disturbed the measurement")
    assert compare(TABLE.assign(disturbed=0.4), "toy/fig1")["verdict"].item() == "within tolerance"


@pytest.mark.parametrize(
    ("tolerance", "expected"), [(None, "within tolerance"), (0.09, "within tolerance"), (0.07, "differs")]
)
def test_a_value_has_a_relative_tolerance(publish, tolerance, expected):
    publish(RECORD if tolerance is None else RECORD | {"tolerance": tolerance})
    row = compare(TABLE, "toy/fig1").iloc[0]
    assert (row["published"], row["ours"], row["evidence"], row["verdict"]) == (0.5, 0.54, "measured", expected)
    assert row["ratio"] == pytest.approx(1.08)
    assert row["reason"] == (None if expected == "within tolerance" else "rounded")


@pytest.mark.parametrize(("slack", "expected"), [(0.6, "within tolerance"), (0.5, "differs")])
def test_a_published_zero_has_an_absolute_tolerance(verdict, slack, expected):
    assert verdict(0.54, value=0, slack=slack) == expected


@pytest.mark.parametrize(
    ("bound", "value", "ours", "expected"),
    [
        ("at_most", 0.9, 0.54, "within tolerance"),  # far on the open side
        ("at_most", 0.54, 0.54, "within tolerance"),  # the limit itself
        ("at_most", 0.53, 0.54, "differs"),  # 2 % beyond it: a value would allow that
        ("at_least", 0.4, 0.54, "within tolerance"),
        ("at_least", 0.55, 0.54, "differs"),
        ("at_most", 0, 0.54, "differs"),
    ],
)
def test_a_limit_is_open_on_one_side_and_has_no_slack_on_the_other(verdict, bound, value, ours, expected):
    assert verdict(ours, bound=bound, value=value) == expected


def test_a_limit_missed_on_the_right_side_of_its_baseline_shows_an_effect(verdict):
    """At least 2 times faster: 1.9 times is 0.9 of that effect, 1.1 times 0.1, 0.9 times negative."""
    limit = {"bound": "at_least", "value": 2, "beside": 1}
    assert [verdict(ours, **limit) for ours in (1.9, 1.1, 0.9)] == ["same effect", "same sign", "differs"]


@pytest.mark.parametrize(
    ("ours", "expected"),
    [
        (19.0, "within tolerance"),  # the upper end reached, within a tenth
        (22.5, "differs"),  # beyond 20 and its tolerance of 2
        (21.5, "within tolerance"),
        (14.0, "same effect"),  # 13 / 19 = 0.68
        (13.7, "same sign"),  # 12.7 / 19 = 0.668
        (0.8, "differs"),  # a slow-down is no gain of up to 20
        (1.0, "differs"),
    ],
)
def test_an_upper_end_is_no_bound_that_a_slow_down_satisfies(verdict, ours, expected):
    assert verdict(ours, bound="up_to", value=20, beside=1) == expected


@pytest.mark.parametrize(
    ("ours", "expected"),
    [
        (1.54, "within tolerance"),
        (1.45, "same effect"),  # 0.45 / 0.67 = 0.672
        (1.44, "same sign"),  # 0.657
        (2.00, "same effect"),  # 1.49
        (2.01, "same sign"),  # 1.507
        (1.0, "differs"),
        (0.9, "differs"),
    ],
)
def test_the_same_effect_is_two_thirds_to_one_and_a_half_of_the_published_one(verdict, ours, expected):
    assert verdict(ours, value=1.67, beside=1) == expected


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({"chance": 79.0}, "differs"),  # 80 % where guessing gives 79
        ({"chance": 60.0}, "same effect"),
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


def test_twelve_times_as_fast_is_not_five_times(verdict):
    """11.84 / 4 is 2.96; their logarithms' ratio, 1.59, once made this pass."""
    assert verdict(12.84, value=5, beside=1) == "same sign"


@pytest.mark.parametrize("ours", [1.43, 1.46, 1.99, 2.02, 0.9])
def test_a_ratio_and_its_inverse_get_the_same_verdict(verdict, ours):
    as_speedup = verdict(ours, value=1.67, beside=1, tolerance=1e-6)
    assert as_speedup == verdict(1 / ours, value=1 / 1.67, beside=1, tolerance=1e-6)


@pytest.mark.parametrize("ours", [0.0, -0.5])
def test_what_is_not_positive_has_no_effect(verdict, ours):
    assert verdict(ours, value=0.5, beside=1) == "differs"


def test_nothing_is_beside_zero(publish):
    """Any positive number is on the right side of 0."""
    publish(RECORD | {"beside": 0})
    with pytest.raises(UserError, match="beside"):
        compare(TABLE, "toy/fig1")


@pytest.mark.parametrize(
    ("low", "high", "expected"), [(1.1, 1.6, "same effect"), (1.0, 1.6, "same sign"), (0.8, 1.6, "same sign")]
)
def test_an_effect_within_the_run_to_run_spread_is_a_sign_at_most(verdict, low, high, expected):
    spread = {"ratio_low": low, "ratio_high": high}
    assert verdict(1.5, spread, value=1.67, beside=1) == expected
    assert verdict(1.5, spread | {"evidence": "modelled"}, value=1.67, beside=1) == "same effect"  # a model has no runs


@pytest.mark.parametrize(("error", "expected"), [(0.9, "same effect"), (1.1, "same sign")])
def test_two_standard_errors_on_both_sides_are_the_spread_of_a_value(publish, error, expected):
    """20 and 24 are 4 apart; 2 × 0.9 from each side leave 0.4 between them, 2 × 1.1 overlap."""
    where = {name: {"where": {"method": name}, "column": "value"} for name in ("dense", "pruned")}
    publish(
        RECORD | where["dense"] | {"value": 9.0, "beside": "x-2"},
        RECORD | where["pruned"] | {"id": "x-2", "value": 11.0, "beside": "x-1"},
    )
    table = pd.DataFrame({"method": ["dense", "pruned"], "value": [20.0, 24.0]}).assign(standard_error=error)
    assert compare(table, "toy/fig1")["verdict"].tolist() == [expected] * 2


SMALL = {
    "where": {"format": "endor", "model": "large"},
    "stand_in": {"format": "endor"},
    "beside": "x-2",
    "value": 0.54,
}
BESIDE = {"where": {"format": "csr", "model": "large"}, "stand_in": {"format": "csr"}, "beside": "x-1", "id": "x-2"}


@pytest.mark.parametrize(
    ("other", "expected"), [(0.9, "same effect"), (0.7, "same sign"), (0.2, "differs"), (0.54, "differs")]
)
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


@pytest.mark.parametrize(("ours", "expected"), [(0.8, "same sign"), (1.01, "differs")])
def test_a_limit_that_a_stand_in_keeps_is_a_sign(verdict, ours, expected):
    large = {"format": "endor", "model": "large"}
    limit = {"bound": "at_most", "value": 1, "beside": 1}
    assert verdict(ours, where=large, stand_in={"format": "endor"}, **limit) == expected


def test_a_stand_in_whose_neighbour_was_not_run_differs(publish):
    publish(RECORD | SMALL, RECORD | BESIDE)
    assert compare(TABLE.iloc[:1].assign(model="small"), "toy/fig1")["verdict"].tolist() == ["differs", "not run"]


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


def test_what_the_paper_says_in_words_is_marked(publish):
    publish(RECORD | {"worded": True})
    assert compare(TABLE, "toy/fig1")["conditions"].item() == "half; in words there"


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
    assert found["reason"].tolist() == [None] * 4  # that of the claim is of measured numbers


def test_every_machine_of_the_paper_is_scored_and_no_other(publish):
    publish(RECORD)
    found = score(compare(MACHINES, "toy/fig1"))
    assert (found["n"], found["largest_error"]) == (2, pytest.approx(0.2))


def test_a_modelled_prediction_without_a_machine_is_refused(publish):
    publish(RECORD)
    table = TABLE.assign(evidence="modelled")
    with pytest.raises(UserError, match="x-1 is modelled for no machine"):
        score(compare(table, "toy/fig1"))
    rows = pd.concat([table.assign(profile=None), MACHINES.assign(format="csr")])
    with pytest.raises(UserError, match="x-1 is modelled for no machine"):
        score(compare(rows, "toy/fig1"))
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


def test_a_figure_without_numbers_has_an_empty_comparison(publish):
    publish(RECORD)
    nothing = compare(TABLE, "toy/fig2")
    assert nothing.columns.tolist() == COLUMNS
    assert compare(TABLE.assign(profile="paper"), "toy/fig2", TABLE).empty
    assert (count_verdicts(nothing), score(nothing)) == ({}, {})
    assert "no number" in score_sentence(nothing)


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
    assert found["verdict"].tolist() == ["within tolerance", "same effect", *["within tolerance"] * 3]
    assert count_verdicts(found) == {
        "input": {"within tolerance": 1},
        "prediction": {"same effect": 1},
        "prediction, limits": {"within tolerance": 1},
    }
    errors = {"n": 1, "median_error": 0.15, "largest_error": 0.15, "largest": "x-2", "null_n": 1}
    errors |= {"null_median_error": 0.2, "null_largest_error": 0.2, "same_median_error": 0.15}
    assert score(found) == pytest.approx(errors | {"same_largest_error": 0.15})
    expected = "1 prediction, off by 15% (median) and 15% (at most, size over dense: half), where bytes over "
    expected += "bandwidth and nothing else "
    assert prediction_words(found) == expected + "are off by 20% and 20%"
    assert score_sentence(found).startswith(
        "prediction: 1 same effect; input: 1 within tolerance; prediction, limits: 1 within tolerance."
    )
    assert verdict_table(found)["reason"].tolist() == [""] * 5


def test_a_null_model_that_says_nothing_of_a_quantity_is_compared_on_the_others(publish):
    publish(RECORD, RECORD | {"id": "x-2", "where": {"format": "csr"}, "value": 2.0})
    table = TABLE.assign(profile="paper", evidence="modelled")
    found = compare(table, "toy/fig1", table.iloc[:1].assign(ratio=0.7))
    assert prediction_words(found) == (
        "2 predictions, off by 29% (median) and 50% (at most, size over dense: half), where bytes over bandwidth and "
        "nothing else are off by 40% and 40% on the 1 that they reach (ours there: 8% and 8%)"
    )

"""LLM in a flash: labels, bytes and sentences of the predictors' notebooks."""

import numpy as np
import pandas as pd
import pytest

from toolkit.papers import flash_predictor_figures as shown
from toolkit.studies import predictors


def test_labels_tell_variants_apart():
    variant = predictors.PredictorVariant
    assert variant("low_rank", (128, 128)).label == "low rank 128 above 0.5"
    assert variant("low_rank", (128, 256), 4, 0.7).label == "low rank 128-256 above 0.7"
    assert variant("gate", kept=0.95, cut=False).label == "gate keeps 95 % all used"
    assert predictors.ALONE.label == "none"


def test_variants_that_predict_alike_are_measured_once():
    one = predictors.PredictorVariant("low_rank", (128, 128))
    assert predictors.PredictorVariant("low_rank", (128, 128), 4).named_once == one
    assert predictors.PredictorVariant("low_rank", (128, 256), 0).named_once == one
    assert predictors.PredictorVariant("low_rank", (128, 256), 4).named_once != one
    kept = predictors.PredictorVariant("gate", kept=0.95)
    assert predictors.PredictorVariant("gate", kept=0.95, cut=False).predictor == kept
    assert predictors.PredictorVariant("gate", kept=0.95, cut=False).named_once != kept


def test_the_papers_predictors_weigh_what_it_says():
    told = shown.paper_shares().set_index("model")["value"]
    ranks = (28 * 128 + 4 * 1024) / 32
    assert ranks == 240  # the mean that B.3 gives
    assert told["opt-6.7b"] == pytest.approx(100 * 240 * (4096 + 16384) / (12 * 4096**2))
    assert told["falcon-7b"] == pytest.approx(4, abs=0.2)


@pytest.fixture
def table():
    """Two kinds at two limits each, with thresholds in place."""
    rows = [
        ("none", "none", 0.2, 0.0, 0.2, 0.0),
        ("gate", "gate keeps 90 %", 0.5, 0.33, 0.33, 0.08),
        ("gate", "gate keeps 99 %", 0.7, 0.33, 0.47, 0.02),
        ("few_bits", "few bits keeps 90 %", 0.2, 0.19, 0.2, 0.06),
        ("few_bits", "few bits keeps 99 %", 0.25, 0.19, 0.25, 0.01),
    ]
    columns = ["kind", "label", "predicted", "resident_share", "read_share", "over_thresholds"]
    return pd.DataFrame(rows, columns=columns).assign(cut=True)


def test_the_cheapest_within_the_goal_is_named(table):
    told = shown.cheapest_sentence(table)
    assert "few bits keeps 99 %" in told
    assert "predicts 25%" in told
    worse = table.assign(over_thresholds=np.where(table["kind"] == "none", 0, 0.1))
    assert "no predictor stays within 3%" in shown.cheapest_sentence(worse)


@pytest.fixture
def accuracy():
    """Two tasks: without predictors, and with two ranks of the last layers."""
    told = [
        ("dense", "none", 0, 0.8),
        ("none", "none", 0, 0.7),
        ("low rank 128-16", "low_rank", 16, 0.5),
        ("low rank 128-64", "low_rank", 64, 0.69),
    ]
    rows = []
    for label, kind, rank, value in told:
        for task in ("first", "second"):
            row = {"label": label, "kind": kind, "sensitive_rank": rank, "task": task, "value": value}
            cost = 1.5 if rank == 16 else 0.2
            rows.append(row | {"standard_error": 0.02, "chance": 0.25, "over_thresholds": cost, "predicted": 0.3})
    return pd.DataFrame(rows)


def test_what_falls_by_more_than_chance_is_named(accuracy):
    shares = accuracy[accuracy["label"] != "dense"].drop_duplicates("label")
    told = shown.accuracy_sentence(accuracy, shares)
    assert "thresholds alone 70.0%" in told
    assert told.endswith("clearly below thresholds alone: low rank 128-16.")
    assert len(shown.accuracy_figure(accuracy, shares).axes) == 2


def test_ranks_are_told_from_the_smallest_to_the_largest(accuracy):
    last = pd.DataFrame({"kind": "low_rank", "sensitive_rank": [16, 16, 64], "false_negatives": [0.4, 0.6, 0.1]})
    told = shown.rank_sentence(accuracy, last)
    assert "From rank 16 to 64" in told
    assert "fall from 50% to 10%" in told
    assert "from +150.0% to +20.0%" in told
    assert len(shown.rank_figure(accuracy).axes) == 2

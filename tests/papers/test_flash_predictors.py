"""LLM in a flash: labels, bytes and sentences of the predictors' notebooks."""

import numpy as np
import pandas as pd
import pytest

from toolkit.papers import flash_predictor_figures as shown
from toolkit.papers import flash_predictors as predictors


def test_labels_tell_variants_apart():
    variant = predictors.Variant
    assert variant("low_rank", (128, 128)).label == "low rank 128 above 0.5"
    assert variant("low_rank", (128, 256), 4, 0.7).label == "low rank 128-256 above 0.7"
    assert variant("gate", kept=0.95, cut=False).label == "gate keeps 95 % all used"
    assert predictors.ALONE.label == "none"


def test_the_papers_predictors_weigh_what_it_says():
    told = predictors.paper_shares().set_index("model")["value"]
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

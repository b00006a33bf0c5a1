"""A difference of log-perplexities is a ratio, with a range."""

import math

import pytest

from toolkit.studies import ratio_range


def test_a_ratio_lies_between_those_a_standard_error_below_and_above():
    found = ratio_range(math.log(1.2), math.log(1.1), "over")
    assert found == pytest.approx({"over": 1.2, "over_low": 1.2 / 1.1, "over_high": 1.2 * 1.1})


def test_one_window_has_no_range():
    found = ratio_range(0.5, math.nan)
    assert found["relative"] == pytest.approx(math.exp(0.5))
    assert math.isnan(found["relative_low"])
    assert math.isnan(found["relative_high"])

"""Numbers as the report shows them, and what its words mean."""

import math

import pytest

from toolkit.evidence import wording
from toolkit.evidence.claims import KINDS
from toolkit.evidence.comparison import GROUPS, VALUES, VERDICTS
from toolkit.evidence.wording import three_digits


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (0.0, "0"),
        (0.012345, "0.0123"),
        (1.0, "1"),
        (-1.2345, "-1.23"),
        (123.4, "123"),
        (1234.5, "1,234"),
        (12345.0, "12,300"),
        (8.259174e7, "82,600,000"),
        (1.234e-7, "1.23e-07"),
        (math.nan, "–"),
        (math.inf, "inf"),
    ],
)
def test_numbers_have_three_digits(number, expected):
    assert three_digits(number) == expected


def test_every_verdict_kind_and_group_is_explained():
    assert set(wording.VERDICTS) == set(VERDICTS)
    assert set(wording.KINDS) == set(KINDS)
    assert set(wording.GROUPS) == set(GROUPS) - {VALUES}

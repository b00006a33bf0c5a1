"""Sentences and numbers as the report shows them."""

import math

import pytest

from toolkit.evidence import wording
from toolkit.evidence.claims import KINDS
from toolkit.evidence.comparison import GROUPS, VALUES, VERDICTS
from toolkit.evidence.wording import LONG, first_sentences, three_digits, without_empty_ranges


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("One of fig. 2 is 1.5. Two. Three.", "One of fig. 2 is 1.5. Two."),
        ("llama.cpp takes 1.2 s, i.e. Q4_0 does. Two", "llama.cpp takes 1.2 s, i.e. Q4_0 does. Two"),
        (f"One. {'X' * LONG}. Three.", "One."),
        ("x" * LONG * 2, "x" * LONG * 2),  # a sentence is never cut
        ("", ""),
    ],
)
def test_first_sentences_are_whole(text, expected):
    assert first_sentences(text) == expected


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
        (1.234e-7, "1.23 × 10⁻⁷"),
        (math.nan, "–"),
        (math.inf, "∞"),
    ],
)
def test_numbers_have_three_digits(number, expected):
    assert three_digits(number) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("56% to 56% of", "56% of"),
        ("+0.044 to +0.044 (draws)", "+0.044 (draws)"),
        ("1.5 to 1.57 and 56 % to 56 %.", "1.5 to 1.57 and 56 %."),
        ("5% to 56%, 0.5 to 0.51, 12 to 2", "5% to 56%, 0.5 to 0.51, 12 to 2"),
    ],
)
def test_a_range_from_a_number_to_itself_is_one_number(text, expected):
    assert without_empty_ranges(text) == expected


def test_every_verdict_kind_and_group_is_explained():
    assert set(wording.VERDICTS) == set(VERDICTS)
    assert set(wording.KINDS) == set(KINDS)
    assert set(wording.GROUPS) == set(GROUPS) - {VALUES}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("It is fast. It is small.", "It is fast."),
        ("", ""),
        ("a word " * 20 + "ends; " + "more " * 30 + "here.", "a word " * 20 + "ends …"),
        ("one (of two, " + "or three " * 30 + ").", "one …"),
        ("x" * 300, "x" * 150 + " …"),
    ],
)
def test_a_line_of_the_terminal_ends_with_something_whole(text, expected):
    assert wording.brief(text) == expected

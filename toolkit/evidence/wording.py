"""Words and numbers as the report shows them: what each verdict means, and three digits."""

import math

from toolkit.evidence import comparison

NOTHING = "–"

KINDS = {
    "prediction": "a model or a run could miss it; only predictions are scored",
    "arithmetic": "it follows from shapes, formats and inputs, whatever the machine",
    "input": "the machine's profile was derived from it, so it is listed and never scored",
    "context": "the set-up, or a number of another study; it has no verdict of its own",
}
VERDICTS = {
    comparison.WITHIN: "ours is within 10 % of the published value, or within the tolerance that the claim states",
    comparison.SAME_EFFECT: "another value, but 0.67 to 1.5 times the published effect, and outside the spread of runs",
    comparison.SAME_SIGN: "faster or slower, larger or smaller, as published, by another amount",
    comparison.DIFFERS: "ours was run and shows none of these, or no more than chance gives",
    comparison.NOT_RUN: "no result here answers to the claim",
}
GROUPS = {
    comparison.LIMITS: "the paper gives a bound (at least, at most), not a value; a bound has no error",
    comparison.STAND_INS: "another model or another machine than the paper's: it can show an effect, never the value",
}


def three_digits(number: float) -> str:
    """A number to read: 0.0123, 1.23, 1,234, 12,300, 82,600,000, 1.23e-07; – for none."""
    if math.isnan(number):
        return NOTHING
    if 100 <= abs(number) < 10_000:
        return f"{number:,.0f}"
    return f"{float(f'{number:.3g}'):,.0f}" if abs(number) >= 100 else f"{number:.3g}"


def cell(value: object) -> str:
    """A value for a table: a number that is not whole with three digits, nothing as a dash."""
    if value is None or value != value:
        return NOTHING
    return three_digits(value) if isinstance(value, float) else str(value)

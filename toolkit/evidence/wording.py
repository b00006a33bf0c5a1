"""Words and numbers as the report shows them: whole sentences, three digits, and what each verdict means."""

import math
import re

from toolkit.evidence import comparison

# the end of a sentence
END = re.compile(r"(?<!\bfig\.)(?<!\btab\.)(?<!\bvs\.)(?<!e\.g\.)(?<!i\.e\.)(?<=[.!?])\s+(?=[^a-z\s])")
EMPTY_RANGE = re.compile(r"(?<![\w.,])([+-]?\d[\d.,]*(?: ?%)?) to \1(?![\d%]|[.,]\d)")
LONG = 320  # characters: a second sentence that goes beyond is left out
DIGITS = 3
LARGE, SMALL = 1e4, 1e-4  # numbers beyond these are rounded to `DIGITS` digits, or written with a power of ten
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


def first_sentences(text: str, count: int = 2) -> str:
    """The first sentences of a text, each whole: `count`, or fewer where these are longer than `LONG` characters."""
    sentences = END.split(text.strip())[:count]
    while len(sentences) > 1 and len(" ".join(sentences)) > LONG:
        sentences.pop()
    return " ".join(sentences)


def without_empty_ranges(text: str) -> str:
    """The text with `56% to 56%` as `56%`."""
    return EMPTY_RANGE.sub(r"\1", text)


def brief(text: str, length: int = 150) -> str:
    """The first sentence of a text, for a line of the terminal. A longer one ends with a part of it that is whole."""
    (sentence,) = first_sentences(text, 1).splitlines() or [""]
    if len(sentence) <= length + 50:
        return sentence
    ends = [match.start() for match in re.finditer(r"[;,:] | \(", sentence[: length + 1]) if _closed(sentence, match)]
    end = ends[-1] if ends else sentence.rfind(" ", 0, length)
    return f"{sentence[: end if end > 0 else length]} …"


def _closed(sentence: str, match: re.Match) -> bool:
    """Whether no bracket is open before the match."""
    before = sentence[: match.start()]
    return before.count("(") == before.count(")")


def three_digits(number: float) -> str:
    """A number to read: 0.0123, 1.23, 1,234, 12,300, 8.26e7 as 82,600,000 and 1.2e-7 as 1.2 × 10⁻⁷; – for none."""
    if math.isnan(number):
        return NOTHING
    if math.isinf(number):
        return "∞" if number > 0 else "−∞"
    if number and abs(number) < SMALL:
        digits, power = f"{number:.{DIGITS - 1}e}".split("e")
        return f"{float(digits):g} × 10{str(int(power)).translate(str.maketrans('-0123456789', '⁻⁰¹²³⁴⁵⁶⁷⁸⁹'))}"
    if abs(number) >= LARGE:
        return f"{float(f'{number:.{DIGITS}g}'):,.0f}"
    if abs(number) >= 10 ** (DIGITS - 1):
        return f"{number:,.0f}"
    return f"{float(f'{number:.{DIGITS}g}'):.10g}"

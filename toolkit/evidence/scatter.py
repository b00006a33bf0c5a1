"""Published numbers against ours, drawn for the report: one mark a distinct prediction, both axes logarithmic."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import pandas as pd

from toolkit.evidence.comparison import distinct_predictions, name_of
from toolkit.evidence.wording import three_digits

SIZE = 300  # of a panel, in units of the SVG
BAND = 1.1  # ours over published, or the inverse, at the edges of the band


@dataclass(frozen=True)
class Mark:
    """One number: its place in the panel, what it is, and whether it is the null model's."""

    x: float
    y: float
    words: str
    null: bool


@dataclass(frozen=True)
class Panel:
    """One paper's predictions. `ticks` are places from 0 to `SIZE` and their labels, of both axes; `band` is half as
    high as the band around the line of equal numbers.
    """

    marks: tuple[Mark, ...]
    ticks: tuple[tuple[float, str], ...]
    band: float
    size: int = SIZE


def panels(comparisons: pd.DataFrame) -> dict[str, Panel]:
    """A panel for each paper that has predictions, from all comparisons with their `paper`."""
    chosen = distinct_predictions(comparisons)
    chosen = chosen[(chosen["published"] > 0) & (chosen["ours"] > 0)]
    return {str(paper): _panel(rows) for paper, rows in chosen.groupby("paper", sort=False)}


def _panel(rows: pd.DataFrame) -> Panel:
    null = rows["null"].where(rows["null"] > 0)
    every = pd.concat([rows["published"], rows["ours"], null.dropna()])
    low, high = math.floor(math.log10(every.min())), math.ceil(math.log10(every.max()))
    high = max(high, low + 1)

    def place(number: float) -> float:
        return round(SIZE * (math.log10(number) - low) / (high - low), 1)

    marks = [
        Mark(place(row["published"]), SIZE - place(number), words, is_null)
        for row, guess in zip(rows.to_dict("records"), null, strict=True)
        for number, words, is_null in _numbers(row, guess)
    ]
    marks.sort(key=lambda mark: not mark.null)  # ours on top
    step = max(1, (high - low) // 4)
    ticks = tuple((place(10.0**power), _power(power)) for power in range(low, high + 1, step))
    return Panel(tuple(marks), ticks, round(SIZE * math.log10(BAND) / (high - low), 1))


def _numbers(row: Mapping, guess: float) -> Iterator[tuple[float, str, bool]]:
    """Ours and the null model's, with the words that a pointer shows."""
    published = f"{name_of(row)}: published {three_digits(row['published'])} {row['unit']}"
    yield row["ours"], f"{published}, ours {three_digits(row['ours'])}", False
    if not math.isnan(guess):
        yield guess, f"{published}, null model {three_digits(guess)}", True


def _power(power: int) -> str:
    return f"{10.0**power:g}" if -3 < power < 5 else f"1e{power}"

"""Passes that were timed several times over: a table with a row a span, and what to show of it."""

import pandas as pd

from toolkit.offload.timeline import Span, Timeline

SPAN = list(Span.__dataclass_fields__)


def timeline_of(spans: pd.DataFrame) -> Timeline:
    """The timeline that rows with the columns of `SPAN` make."""
    return Timeline(tuple(Span(**row) for row in spans[SPAN].to_dict("records")), "measured")


def totals(spans: pd.DataFrame) -> dict[int, float]:
    """Seconds of each repetition but number 0, which warms up."""
    return {number: timeline_of(rows).total_s for number, rows in spans.groupby("repetition") if number > 0}


def median_repetition(spans: pd.DataFrame) -> int:
    """The number of the repetition whose total is the median, the lower one of two."""
    found = totals(spans)
    return sorted(found, key=found.get)[(len(found) - 1) // 2]


def median_stages(spans: pd.DataFrame) -> pd.DataFrame:
    """`Timeline.stages()` of that repetition; low_s, median_s and high_s: each stage's seconds in all of them."""
    every = [timeline_of(rows).stages() for number, rows in spans.groupby("repetition") if number > 0]
    seconds = pd.concat(every).groupby("stage")["seconds"]
    shown = timeline_of(spans[spans["repetition"] == median_repetition(spans)]).stages()
    spread = {"low_s": seconds.min(), "median_s": seconds.median(), "high_s": seconds.max()}
    return shown.assign(**{name: shown["stage"].map(values) for name, values in spread.items()})

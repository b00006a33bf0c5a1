"""Passes that were timed several times: a table with a row for each span, kept on disk, and summaries of it."""

import importlib.metadata
from collections.abc import Callable, Mapping
from datetime import UTC, datetime

import pandas as pd
import torch

from toolkit import sources
from toolkit.cache import cached_table
from toolkit.machines.probe import describe
from toolkit.timeline.spans import Span, Timeline

SPAN = list(Span.__dataclass_fields__)
CIRCUMSTANCES = ["mode", "measured_at"]  # the same for all spans of a pass
VERSIONED = ("torch", "numba", "transformers", "accelerate")


def kept_spans(
    key: Mapping[str, object], modules: tuple[str, ...], measure: Callable[[], pd.DataFrame], fresh: bool
) -> pd.DataFrame:
    """The table that `measure` gives, from the cache unless `fresh`. `measured_at` says when it was measured, in UTC.

    It is measured again for another key, code of `modules`, machine, disk, number of threads or version of a library.
    """
    versions = {name: importlib.metadata.version(name) for name in VERSIONED}
    key = {**key, "machine": describe(), "threads": torch.get_num_threads(), "versions": versions}

    def stamped() -> pd.DataFrame:
        return measure().assign(measured_at=datetime.now(UTC).isoformat(timespec="seconds"))

    return cached_table("measured", key, sources.dependencies(*modules), stamped, fresh)


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
    """`Timeline.stages()` of the median repetition, with the columns of `CIRCUMSTANCES`.

    low_s, median_s and high_s are each stage's least, median and most seconds of all repetitions but number 0.
    """
    every = [timeline_of(rows).stages() for number, rows in spans.groupby("repetition") if number > 0]
    seconds = pd.concat(every).groupby("stage")["seconds"]
    shown = timeline_of(spans[spans["repetition"] == median_repetition(spans)]).stages()
    spread = {"low_s": seconds.min(), "median_s": seconds.median(), "high_s": seconds.max()}
    shown = shown.assign(**{name: shown["stage"].map(values) for name, values in spread.items()})
    return shown.assign(**spans[CIRCUMSTANCES].iloc[0])

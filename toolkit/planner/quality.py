"""The price of a way in quality: a model's perplexity with it over the one without.

    price_of(open_target("llama2-70b"), way)                   # of smollm2-135m, and says so
    price_of(open_target("smollm2-135m"), way, measure=True)   # measured now, and kept

A measurement of the model itself on this machine comes first, then its price in the kept results
(`toolkit.planner.prices`), then an embedded model's.
"""

import logging
from dataclasses import dataclass
from math import exp, isnan, nan

import pandas as pd

from toolkit.errors import UserError
from toolkit.planner.measured import measured
from toolkit.planner.prices import load_prices
from toolkit.planner.target import Target
from toolkit.planner.treatments import EXACT
from toolkit.planner.ways import NEURONS, RIVAL, PlannedWay
from toolkit.records import line
from toolkit.studies.quality import EvaluationSettings

SEQUENCE_LENGTH, WINDOWS = 512, 2  # of a measurement here
SAME_BITS = 0.1  # share by which the bits of a measurement may differ from those of the way

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Quality:
    """The price of a way.

    `ratio` is perplexity over that of the model as it is published, NaN if nobody has measured it; `low` and `high` are
    the range over machines, with the standard error window by window where that is known. `model` was measured, or says
    why its measurement does not count. `bits`: of a decoder weight of `model` as it was measured, if that is known.
    """

    ratio: float
    low: float
    high: float
    model: str
    bits: float | None = None


def price_of(target: Target, way: PlannedWay, text: str = "wiki-slice", measure: bool = False) -> Quality:
    """The price of a way, measured at about as many bits a weight.

    With `measure` it is measured now, on a few windows of the corpus `text`, if it can be; else a warning says why.
    llama.cpp stores rows whose length is no multiple of 256 in larger types, so a small model may have more bits.
    """
    if way.treatment in EXACT or (way.kind == NEURONS and target.own_thresholds):  # a sparse model has these zeros
        return Quality(1.0, 1.0, 1.0, target.name)
    found = _measured_here(target, way, text, measure) if target.loadable else None
    found = found or _in_kept_results(target, way)
    if way.kind == RIVAL and found.bits and abs(found.bits / way.bits - 1) > SAME_BITS:
        return Quality(nan, nan, nan, f"– ({found.model}: {found.bits:.1f} bits)")
    return found


def _measured_here(target: Target, way: PlannedWay, text: str, measure: bool) -> Quality | None:
    try:
        settings = EvaluationSettings(target.name, text, SEQUENCE_LENGTH, WINDOWS)
        table = measured(target.name, way.treatment, settings, make=measure)
    except UserError as error:
        log.warning("%s: quality with %s is not measured: %s", target.name, way.treatment, line(error))
        return None
    if table is None:
        return None
    difference, error = table.fillna(0).iloc[0]
    ratio = exp(difference)
    return Quality(ratio, ratio * exp(-error), ratio * exp(error), target.name)


def _in_kept_results(target: Target, way: PlannedWay) -> Quality:
    """The price in the source with most text, of this model if there is one.

    It is the median of the ratios of all machines; the range has the least and the largest, their errors included.
    """
    prices = load_prices()
    prices = prices[prices["treatment"] == way.treatment]
    if prices.empty:
        return Quality(nan, nan, nan, "")
    model = target.name if target.name in set(prices["model"]) else prices["model"].min()
    texts = prices[prices["model"] == model].groupby(["source", "corpus", "sequence_length", "windows"])
    rows = max((rows for _, rows in texts), key=_weight)
    ratios, errors = rows["perplexity"] / rows["dense_perplexity"], rows["ratio_error"].fillna(0).map(exp)
    low, high, bits = (ratios / errors).min(), (ratios * errors).max(), rows["bits"].median()
    return Quality(float(ratios.median()), float(low), float(high), model, None if isnan(bits) else float(bits))


def _weight(rows: pd.DataFrame) -> tuple[int, int]:
    """Tokens that were evaluated, and measurements with an error."""
    tokens = (rows["sequence_length"] * rows["windows"]).iloc[0]
    return int(tokens), int(rows["ratio_error"].notna().sum())

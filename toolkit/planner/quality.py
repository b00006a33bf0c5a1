"""The price of a way in quality: a model's perplexity with it over the one without.

    price_of(open_target("llama2-70b"), way)                   # of smollm2-135m, and says so
    price_of(open_target("smollm2-135m"), way, measure=True)   # measured now, and kept

A measurement of the model itself comes first, then its price in the kept results, then an embedded model's.
"""

import logging
from dataclasses import dataclass
from math import exp, isnan

import pandas as pd

from toolkit.errors import UserError
from toolkit.planner.measured import measured
from toolkit.planner.prices import load_prices
from toolkit.planner.target import Target
from toolkit.planner.treatments import EXACT
from toolkit.planner.ways import NEURONS, RIVAL, PlannedWay
from toolkit.records import line
from toolkit.studies.quality import EvaluationSettings

SEQUENCE_LENGTH, WINDOWS = 512, 2  # of what is measured here
SAME_BITS = 0.1  # share by which the bits of a measurement may differ from those of the way

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Quality:
    """The cost of a way.

    `ratio` is perplexity over that of the model as it is published; `low` and `high` are the range over machines, with
    the standard error window by window where that is known. `own`: it was measured of this model, else of `model`.
    `source` says where it was measured. `bits`: of a decoder weight of `model` as it was measured, if the source says.
    """

    ratio: float
    low: float
    high: float
    own: bool
    model: str
    source: str
    bits: float | None = None


def price_of(target: Target, way: PlannedWay, text: str = "wiki-slice", measure: bool = False) -> Quality | None:
    """The price of a way; None if nothing is known of it at about as many bits a weight.

    With `measure` it is measured now, on a few windows of the corpus `text`, if it can be; else a warning says why.
    """
    found = _known(target, way, text, measure)
    same_bits = found is None or found.bits is None or abs(found.bits / way.bits - 1) <= SAME_BITS
    return found if way.kind != RIVAL or same_bits else None


def why_unpriced(target: Target, way: PlannedWay, text: str = "wiki-slice") -> str:
    """Why a way has no price though its treatment was measured: at which bits, and of which model. Empty otherwise.

    llama.cpp stores rows whose length is no multiple of 256 in larger types, so a small model may have more bits.
    """
    found = _known(target, way, text)
    return f"– ({found.model}: {found.bits:.1f} bits)" if found and found.bits else ""


def _known(target: Target, way: PlannedWay, text: str, measure: bool = False) -> Quality | None:
    if way.treatment in EXACT or (way.kind == NEURONS and target.own_thresholds):  # a sparse model has these zeros
        return Quality(1.0, 1.0, 1.0, True, target.name, "the weights as they are")
    own = _measured_here(target, way, text, measure) if target.loadable else None
    return own or _in_kept_results(target, way)


def _measured_here(target: Target, way: PlannedWay, text: str, measure: bool) -> Quality | None:
    try:
        table = measured(
            target.name, way.treatment, EvaluationSettings(target.name, text, SEQUENCE_LENGTH, WINDOWS), make=measure
        )
    except UserError as error:
        log.warning("%s: quality with %s is not measured: %s", target.name, way.treatment, line(error))
        return None
    if table is None:
        return None
    row = table.iloc[0]
    ratio, error = exp(row["log_difference"]), 0 if isnan(row["difference_error"]) else row["difference_error"]
    where = f"measured here ({row['windows']} windows of {row['sequence_length']}, {row['corpus']})"
    return Quality(ratio, ratio * exp(-error), ratio * exp(error), True, target.name, where)


def _in_kept_results(target: Target, way: PlannedWay) -> Quality | None:
    """The price in the source with most text, of this model if there is one."""
    prices = load_prices()
    prices = prices[prices["treatment"] == way.treatment]
    if prices.empty:
        return None
    own = target.name in set(prices["model"])
    model = target.name if own else prices["model"].min()
    prices = prices[prices["model"] == model]
    texts = [rows for _, rows in prices.groupby(["source", "corpus", "sequence_length", "windows"])]
    return _over_machines(max(texts, key=_weight), own)


def _weight(rows: pd.DataFrame) -> tuple[int, int]:
    """Tokens that were evaluated, and measurements with an error."""
    tokens = (rows["sequence_length"] * rows["windows"]).iloc[0]
    return int(tokens), int(rows["ratio_error"].notna().sum())


def _over_machines(rows: pd.DataFrame, own: bool) -> Quality:
    """Median of the ratios of all machines, the least and the largest, their standard errors included."""
    ratios = rows["perplexity"] / rows["dense_perplexity"]
    errors = rows["ratio_error"].fillna(0).map(exp)
    first, machines, bits = rows.iloc[0], ", ".join(sorted(rows["machine"].unique())), rows["bits"].median()
    where = (
        f"{first['source']} ({first['windows']} windows of {first['sequence_length']}, {first['corpus']}; {machines})"
    )
    return Quality(
        float(ratios.median()),
        float((ratios / errors).min()),
        float((ratios * errors).max()),
        own,
        first["model"],
        where,
        None if isnan(bits) else float(bits),
    )

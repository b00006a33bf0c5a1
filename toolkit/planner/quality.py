"""The price of a treatment in quality: a model's perplexity with it over the one without.

    quality_of(open_target("llama2-70b"), "wanda", 0.5)      # of smollm2-135m, and says so
    measure_quality(open_target("smollm2-135m"), "wanda", 0.6)   # measured now, and kept

What was measured of the model itself comes first. Else the ratio is that of an embedded model with measured curves,
between two levels of it on a straight line of log-perplexity, and never beyond them. Points of two models, or of two
texts, are never joined.
"""

import logging
import re
from dataclasses import dataclass
from math import exp, isnan

import pandas as pd

from toolkit.errors import UserError, unknown
from toolkit.planner.curves import load_curves
from toolkit.planner.measured import measured
from toolkit.planner.target import Target
from toolkit.planner.treatments import EXACT, EXPERTS, FORMS, TREATMENTS, ZEROS
from toolkit.planner.ways import RIVAL, PlannedWay
from toolkit.records import line
from toolkit.studies.quality import EvaluationSettings

HERE = "measured here"
ONE_LEVEL = dict.fromkeys(FORMS, "") | {"dense": "16", "gguf F16": "16"}
SAME_BITS = 0.1  # share by which the bits of a measurement may differ from those asked for
OWN_ZEROS = 0.01  # how near a sparse model's share of zeros is to the one that it was made for

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Quality:
    """What a treatment costs.

    `ratio` is perplexity over that of the model as it is published; `low` and `high` are the range over machines, with
    the standard error window by window where that is known. `own`: it was measured of this model, else of `model`.
    `interpolated`: from the two levels beside the one asked for. `source` says where it was measured. `bits`: of a
    decoder weight of `model` as it was measured, if the curve says so: llama.cpp gives rows of another length than a
    multiple of 256 more bits than a type's name says.
    """

    ratio: float
    low: float
    high: float
    own: bool
    model: str
    source: str
    interpolated: bool = False
    bits: float | None = None


def quality_of(
    target: Target,
    treatment: str,
    level: float | str,
    text: str = "wiki-slice",
    windows: int = 2,
    sequence_length: int = 512,
) -> Quality | None:
    """The price of a treatment, without measuring; None if nothing is known of it.

    Args:
        treatment: a name of `TREATMENTS`, or of llama.cpp's types such as "gguf F16".
        level: share of zeros, pattern or bits. Treatments with a single level ignore it.
        text, windows, sequence_length: of what `measure_quality` has kept; curves have their own.

    Raises `UserError` for an unknown treatment.
    """
    level, settings = _text(treatment, level), EvaluationSettings(target.name, text, sequence_length, windows)
    if _is_exact(target, treatment, level):
        return Quality(1.0, 1.0, 1.0, True, target.name, "the weights as they are")
    if not _applies(target, treatment):
        return None
    if target.loadable and (table := measured(target.name, treatment, level, settings, make=False)) is not None:
        return _quality(table, target.name)
    curves = load_curves()
    curves = curves[curves["treatment"] == treatment]
    names = sorted(curves["model"].unique(), key=lambda name: name != target.name)
    found = (_on_curves(curves[curves["model"] == name], treatment, level, target.name == name) for name in names)
    return next((quality for quality in found if quality is not None), None)


def measure_quality(
    target: Target,
    treatment: str,
    level: float | str,
    text: str = "wiki-slice",
    windows: int = 2,
    sequence_length: int = 512,
) -> Quality | None:
    """The price of a treatment, measured now on a few windows of evaluation text and kept.

    None if it cannot be measured for this model; a warning says why. Arguments and errors are those of `quality_of`;
    `text` is a corpus as `load_tokens` takes it.
    """
    level, settings = _text(treatment, level), EvaluationSettings(target.name, text, sequence_length, windows)
    if _is_exact(target, treatment, level):
        return quality_of(target, treatment, level)
    try:
        if not target.loadable:
            raise UserError(f"of this {target.source} no weights can be loaded")
        return _quality(measured(target.name, treatment, level, settings), target.name)
    except UserError as error:
        told = f"{treatment} at {level}" if level else treatment
        log.warning("%s: quality with %s is not measured: %s", target.name, told, line(error))
        return None


def _text(treatment: str, level: float | str) -> str:
    """A level as curves and keys have it: "0.5", "2:4", "4"; that of a treatment with one level is always the same."""
    if treatment in ONE_LEVEL:
        return ONE_LEVEL[treatment]
    if treatment not in TREATMENTS:
        raise unknown("treatment", treatment, {*TREATMENTS, *ONE_LEVEL})
    text = level if isinstance(level, str) else f"{level:g}"
    share, pattern = _number(text), re.fullmatch(r"\d+:\d+", text)
    if treatment.startswith("experts"):
        levels = {known for name, known in (*EXPERTS, *EXACT) if name == treatment}
        if text not in levels:
            raise unknown(f"level of {treatment!r}", text, levels)
    elif not (pattern and treatment not in ZEROS) and not (share is not None and 0 <= share < 1):
        raise UserError(f"{treatment} at {text!r:.99}: expected a share of zeros from 0 to below 1, such as 0.5")
    return text


def _is_exact(target: Target, treatment: str, level: str) -> bool:
    """Whether nothing changes, such as for a sparse model that is asked for the zeros that it has."""
    own = treatment in ZEROS and target.zeros is not None and abs(float(level) - target.zeros) < OWN_ZEROS
    return own or (treatment, level) in EXACT


def _applies(target: Target, treatment: str) -> bool:
    """Whether the treatment can be done to such a model at all."""
    if treatment in ZEROS:
        return not target.own_thresholds and not target.shape.experts
    return bool(target.shape.experts) or not treatment.startswith("experts")


def _on_curves(points: pd.DataFrame, treatment: str, level: str, own: bool) -> Quality | None:
    """The price by measurements of one model and treatment: of a source with this very level, and with most text."""
    found = []
    for (*_, length, windows), group in points.groupby(["source", "corpus", "sequence_length", "windows"]):
        if (quality := _at(group, treatment, level, own)) is not None:
            paired = int(group["ratio_error"].notna().sum())
            found.append(((not quality.interpolated, length * windows, paired), quality))
    return max(found, key=lambda each: each[0])[1] if found else None


def _at(points: pd.DataFrame, treatment: str, level: str, own: bool) -> Quality | None:
    """The price by measurements of one model, treatment, text and source; between two levels if need be."""
    level = points["level"].iloc[0] if treatment in FORMS else level
    groups, model = dict(list(points.groupby("level"))), points["model"].iloc[0]
    if level in groups:
        bits = groups[level]["bits"].median()
        known = None if isnan(bits) else float(bits)
        return Quality(*_range(groups[level]), own, model, _where(groups[level]), bits=known)
    wanted = _number(level)
    if wanted is None or treatment.startswith("experts"):
        return None
    shares = {share: _range(group) for each, group in groups.items() if (share := _number(each)) is not None}
    if treatment != "zeros recovered":
        shares[0.0] = (1.0, 1.0, 1.0)  # without zeros it is the model itself
    below, above = [share for share in shares if share < wanted], [share for share in shares if share > wanted]
    if not below or not above:
        return None
    lower, upper = max(below), min(above)
    weight = (wanted - lower) / (upper - lower)
    ratio = shares[lower][0] ** (1 - weight) * shares[upper][0] ** weight
    ends = (*shares[lower], *shares[upper])
    beside = points[points["level"].map(_number).isin([lower, upper])]
    return Quality(ratio, min(ends), max(ends), own, model, _where(beside), interpolated=True)


def _number(level: str) -> float | None:
    try:
        return float(level)
    except ValueError:
        return None


def _range(points: pd.DataFrame) -> tuple[float, float, float]:
    """Median of the ratios of all machines, the least and the largest, their standard errors included."""
    ratios = points["perplexity"] / points["dense_perplexity"]
    errors = points["ratio_error"].fillna(0).map(exp)
    return float(ratios.median()), float((ratios / errors).min()), float((ratios * errors).max())


def _where(points: pd.DataFrame) -> str:
    text = points.iloc[0]
    machines = ", ".join(sorted(points["machine"].unique()))
    return f"{text['source']} ({text['windows']} windows of {text['sequence_length']}, {text['corpus']}; {machines})"


def _quality(table: pd.DataFrame, name: str) -> Quality:
    row = table.iloc[0]
    ratio, error = exp(row["log_difference"]), 0 if isnan(row["difference_error"]) else row["difference_error"]
    where = f"{HERE} ({row['windows']} windows of {row['sequence_length']}, {row['corpus']})"
    return Quality(ratio, ratio * exp(-error), ratio * exp(error), True, name, where)


def price_of(target: Target, way: PlannedWay, text: str = "wiki-slice", measure: bool = False) -> Quality | None:
    """The price of a way; None if nothing is known of it. With `measure` it is measured now, if it can be.

    Raises what `quality_of` raises.
    """
    asked = (target, way.treatment, way.level, text)
    found = (measure_quality(*asked) if measure and target.loadable else None) or quality_of(*asked)
    return of_these_bits(found, way.bits) if way.kind == RIVAL else found


def of_these_bits(quality: Quality | None, bits: float) -> Quality | None:
    """The price if it was measured at about as many bits a weight; None if not, since bytes and price belong together.

    llama.cpp stores rows whose length is no multiple of 256 in larger types, so a small model may have more bits.
    """
    if quality is None or quality.bits is None or isnan(quality.bits):
        return quality
    return quality if abs(quality.bits / bits - 1) <= SAME_BITS else None


def why_unpriced(target: Target, way: PlannedWay, text: str = "wiki-slice") -> str:
    """Why a way has no price though its treatment was measured: at which bits, and of which model. Else nothing."""
    found = quality_of(target, way.treatment, way.level, text)
    return f"– ({found.model}: {found.bits:.1f} bits)" if found and found.bits else ""

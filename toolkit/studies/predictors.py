"""Predictors of active neurons, trained and compared (LLM in a flash, sections 3.1, B and C)."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from toolkit.cache import kept, kept_folder
from toolkit.errors import unknown
from toolkit.models.ffn import FFN, decoder_ffns
from toolkit.predictors import (
    PREDICTORS,
    LowRank,
    Predictor,
    Samples,
    StateAndParents,
    load_predictors,
    predicted,
    prediction_quality,
    save_predictors,
    with_limits,
)
from toolkit.predictors.states import find_parents, load_parents, save_parents
from toolkit.sparsity.changed import LOADING
from toolkit.studies.loaded import loaded, weights_key
from toolkit.studies.quality import Alteration, EvaluationSettings, accuracy, paired, quality
from toolkit.studies.thresholded import ThresholdedModel, few_samples, samples, thresholds

FILE = "predictors.safetensors"


@dataclass(frozen=True)
class PredictorVariant:
    """A kind of predictor and how its limits are chosen.

    `kind` is "none" (thresholds alone) or a key of `toolkit.predictors.PREDICTORS`. `ranks` are a low-rank predictor's
    in the first layers and in the last `sensitive` ones; it predicts where the sigmoid of the score exceeds `sigmoid`.
    The others predict where the score exceeds the layer's threshold. If `kept` is given, limits are chosen instead so
    that they keep this share of the magnitudes on calibration text. With `cut`, a predicted neuron counts only if it
    exceeds the threshold. Without it, all loaded neurons count, which costs no further bytes.
    """

    kind: str = "none"
    ranks: tuple[int, int] = (0, 0)
    sensitive: int = 0
    sigmoid: float = 0.5
    kept: float | None = None
    cut: bool = True

    @property
    def label(self) -> str:
        """In tables and figures."""
        ranks = "-".join(map(str, dict.fromkeys(self.ranks))) if self.kind == "low_rank" else ""
        kept = "" if self.kept is None else f"keeps {self.kept:.0%}".replace("%", " %")
        limit = f"above {self.sigmoid:g}" if self.kind == "low_rank" and not kept else ""
        used = "" if self.cut else "all used"
        return " ".join(filter(None, [self.kind.replace("_", " "), ranks, limit or kept, used]))

    def __post_init__(self):
        """Give variants that are the same the same fields: where all layers have one rank, none is a sensitive one."""
        if self.sensitive == 0 or self.ranks[0] == self.ranks[1]:
            object.__setattr__(self, "ranks", (self.ranks[0],) * 2)
            object.__setattr__(self, "sensitive", 0)

    @property
    def predictor(self) -> "PredictorVariant":
        """The variant with the same predictor; ignores `cut`."""
        return replace(self, cut=True)


ALONE = PredictorVariant()  # thresholds without a predictor, as if an oracle told which neurons to load
BASELINES = (PredictorVariant("copy_last"), PredictorVariant("nothing"))  # they cost no byte, and are in every table


@dataclass(frozen=True)
class Predicted(Alteration):
    """A model with thresholds and a variant's predictors in place."""

    setting: ThresholdedModel
    variant: PredictorVariant = ALONE
    prompt: int = 0
    """Tokens at the start of each sequence for which all neurons are loaded."""

    @contextmanager
    def change(self, settings: EvaluationSettings) -> Iterator[dict[str, float | str]]:
        """There are no facts. Raises what `predictors` raises."""
        limits, model = thresholds(self.setting), loaded(settings.model)[0]
        used = limits if self.variant.cut else torch.full_like(limits, -1)
        with predicted(model, used, _layers(self.setting, self.variant), self.setting.criterion, self.prompt):
            yield {}


def predictors(setting: ThresholdedModel, variant: PredictorVariant) -> list[Predictor]:
    """The predictors of a variant. Low-rank ones are trained once and kept.

    Raises `UserError` for an unknown kind, "none", or ranks that the model does not have.
    """
    return _predictors(setting, variant.predictor)


@cache
def _predictors(setting: ThresholdedModel, variant: PredictorVariant) -> list[Predictor]:
    layers = _without_limits(setting, replace(variant, kept=None))
    if variant.kept is not None:
        layers = with_limits(layers, few_samples(setting, "limits"), variant.kept)
    return list(layers)


@cache
def _without_limits(setting: ThresholdedModel, variant: PredictorVariant) -> Sequence[Predictor]:
    limits = thresholds(setting).tolist()
    if variant.kind not in PREDICTORS:
        raise unknown("predictor", variant.kind, PREDICTORS)
    if variant.kind == LowRank.name:
        return _low_rank(setting, variant, len(limits))
    kind = PREDICTORS[variant.kind]
    if issubclass(kind, StateAndParents):
        return kind.with_parents(loaded(setting.model)[0], load_parents(_parents(setting) / FILE, setting.model))
    return kind.fit(loaded(setting.model)[0], limits)


@kept_folder("parents", without=LOADING, key=weights_key)
def _parents(folder: Path, setting: ThresholdedModel) -> None:
    seen = samples(setting, "training")
    save_parents(folder / FILE, setting.model, find_parents(seen.active(layer) for layer in range(seen.layers)))


def _low_rank(setting: ThresholdedModel, variant: PredictorVariant, layers: int) -> list[LowRank]:
    """Low-rank predictors: those of the last layers may have a rank of their own."""
    first, last = variant.ranks
    trained = _trained(setting, first, 0)
    if variant.sensitive and last != first:
        start = layers - variant.sensitive
        trained[start:] = _trained(setting, last, start)
    return [predictor.at(math.log(variant.sigmoid / (1 - variant.sigmoid))) for predictor in trained]


def _trained(setting: ThresholdedModel, rank: int, first: int) -> list[LowRank]:
    """The predictors of the layers from the first on."""
    found = load_predictors(_training(setting, rank, first) / FILE, setting.model)
    return [predictor for predictor in found if isinstance(predictor, LowRank)]


@kept_folder("predictors", without=LOADING, key=weights_key)
def _training(folder: Path, setting: ThresholdedModel, rank: int, first: int) -> None:
    seen = _samples_of_last(setting, first) if first else samples(setting, "training")
    save_predictors(folder / FILE, setting.model, LowRank.train(seen, rank))


@lru_cache(maxsize=1)  # the last layers are trained at several ranks; samples of all layers take too much to stay
def _samples_of_last(setting: ThresholdedModel, first: int) -> Samples:
    return samples(setting, "training").of_layers(slice(first, None))


def compare_predictors(
    setting: ThresholdedModel, variants: Sequence[PredictorVariant], evaluation_windows: int, prompt: int = 0
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The predictions of each variant and of `BASELINES` in each layer, and their cost in perplexity; kept one by one.

    The first table is `quality` on evaluation text with the columns `_labels` more. The second has a row a variant:
    those labels; nbytes of the predictors; resident_share and read_share (bytes of the predictors, and of the neurons
    that a token needs, over those of the FFNs); means over layers of active, predicted, accuracy, recall, precision,
    false_negatives, false_positives and kept; perplexity, sequence_length, windows; over_thresholds (its ratio to the
    perplexity with thresholds alone, less 1) and difference_error (standard error of that ratio's logarithm).

    Predictions on the text are counted with a predictor that observes all that fires. Perplexity is that of an
    engine, which observes only what it computed: so a copy of the last token's neurons shrinks from token to token.
    For the first `prompt` tokens of each window all neurons are loaded: they are in the perplexity, and not counted.
    Raises what `predictors` raises.
    """
    variants = [*variants, *BASELINES]
    wanted = list(dict.fromkeys((ALONE, *variants)))
    layers = {variant: _by_layer(setting, variant.predictor, prompt) for variant in wanted}
    text = setting.text(evaluation_windows)
    lost = {each: quality(text, Predicted(setting, each, prompt)) for each in wanted}
    tables = [rows.assign(**_labels(setting, variant)) for variant, rows in layers.items()]
    ffns = decoder_ffns(loaded(setting.model)[0])
    whole = [
        _bytes(ffns, variant, layers[variant])
        | layers[variant][MEANS].mean().to_dict()
        | _cost(lost[variant], lost[ALONE])
        | _labels(setting, variant)
        for variant in variants
    ]
    more = {"sequence_length": setting.sequence_length, "evidence": "measured"}
    return pd.concat(tables, ignore_index=True).assign(**more), pd.DataFrame(whole).assign(**more)


def _cost(table: pd.DataFrame, alone: pd.DataFrame) -> dict[str, float]:
    """The columns of `compare_predictors` on a variant's perplexity, from tables of `quality`."""
    pair = paired(table, alone)
    cost = {"perplexity": table["value"].iloc[0], "over_thresholds": np.exp(pair["value"]) - 1}
    return cost | {"difference_error": pair["standard_error"], "windows": pair["items"]}


MEANS = ["active", "predicted", "accuracy", "recall", "precision", "false_negatives", "false_positives", "kept"]


def _labels(setting: ThresholdedModel, variant: PredictorVariant) -> dict:
    named = {"model": setting.model, "zeros": setting.zeros, "criterion": setting.criterion, "label": variant.label}
    ranks = {"rank": variant.ranks[0], "sensitive_rank": variant.ranks[1]}
    return named | ranks | {"kind": variant.kind, "sigmoid": variant.sigmoid, "cut": variant.cut}


def compare_accuracy(
    setting: ThresholdedModel, variants: Sequence[PredictorVariant], tasks: Sequence[str], task_limit: int | None
) -> pd.DataFrame:
    """Zero-shot accuracy of the dense model, with thresholds alone, with predictors and `BASELINES`; kept one by one.

    Columns: `_labels` (the dense model's label is "dense"), those of `evaluate_tasks`, and evidence. Raises what
    `predictors` and `evaluate_tasks` raise.
    """
    text = replace(setting.text(), tasks=tuple(tasks), task_limit=task_limit)
    dense = replace(setting, zeros=0.0)
    cut = [(setting, variant, variant.label) for variant in (ALONE, *variants, *BASELINES)]
    tables = []
    for one, variant, label in [(dense, ALONE, "dense"), *cut]:
        rows = accuracy(text, Predicted(one, variant))
        tables.append(rows.assign(**_labels(one, variant) | {"label": label}))
    return pd.concat(tables, ignore_index=True).assign(evidence="measured")


def _bytes(ffns: Sequence[FFN], variant: PredictorVariant, by_layer: pd.DataFrame) -> dict[str, float]:
    """Bytes over those of the FFNs: what predictors keep in memory, and what a token reads from disk.

    Gate weights in memory are not read from disk.
    """
    whole = sum(linear.weight.nbytes for ffn in ffns for linear in (ffn.gate, ffn.up, ffn.down) if linear)
    gates = sum(ffn.gate.weight.nbytes for ffn in ffns) if variant.kind == "gate" else 0
    read = by_layer["predicted"].mean() * (1 - gates / whole)
    nbytes = by_layer["nbytes"].sum()
    return {"nbytes": nbytes, "resident_share": nbytes / whole, "read_share": read}


@kept("predictions", without=LOADING, key=weights_key)
def _by_layer(setting: ThresholdedModel, variant: PredictorVariant, prompt: int = 0) -> pd.DataFrame:
    """The predictions of a variant on some evaluation text, a row for each layer, as `quality` has it."""
    rows = prediction_quality(_layers(setting, variant), few_samples(setting, "evaluation"), prompt)
    oracle = {"predicted": rows["active"], "accuracy": 1.0, "precision": 1.0, "false_positives": 0.0}
    return rows.assign(**oracle if variant == ALONE else {})


def _layers(setting: ThresholdedModel, variant: PredictorVariant) -> Sequence[Predictor | None]:
    """The predictors, or none at all for `ALONE`."""
    return [None] * len(thresholds(setting)) if variant == ALONE else predictors(setting, variant)

"""Thresholds, predictors and usage of a folder that `toolkit.offload.by_neuron` runs, from calibration text."""

from collections.abc import Callable, Sequence
from pathlib import Path

from torch import nn

from toolkit.errors import unknown
from toolkit.offload.by_neuron import PREDICTORS, USAGE
from toolkit.predictors import STORED, Predictor, Samples, save_predictors, with_limits
from toolkit.sparsity import Magnitudes, thresholds_of
from toolkit.sparsity.calibration import Calibration
from toolkit.sparsity.statistics import save_usage
from toolkit.storage.neuron_packing import Neurons, check_packable

KINDS = (*STORED, "none")
KEPT = 0.99  # of the magnitudes that limits keep
SAMPLED = 2  # windows at most, on which limits are chosen and neurons are counted


def fit_neurons(
    model: nn.Module, name: str, tokens: object, zeros: float, kind: str, calibration: Calibration
) -> tuple[Neurons, Callable[[Path], None]]:
    """Fit thresholds and predictors to calibration text, and count which neurons it uses.

    Args:
        model: keeps thresholds of its own, if it has any.
        name: of the model.
        tokens: a row of token ids; the first windows of `calibration` are taken.
        zeros: the share of each layer's outputs that its threshold sets to zero. With 0 all thresholds are 0.
        kind: of predictors, one of `KINDS`.
        calibration: how many windows, and how long they are.

    Returns what `pack_model` takes as `layout` and as `files`. Raises what `check_packable`, `Magnitudes` and the
    predictors raise, and `UserError` for an unknown kind.
    """
    if kind not in KINDS:
        raise unknown("predictors", kind, KINDS)
    check_packable(model)
    cut = {"windows": calibration.windows, "sequence_length": calibration.sequence_length}
    if (thresholds := thresholds_of(model)) is None:
        thresholds = Magnitudes.measure(model, tokens, **cut).thresholds(zeros)
    if kind == "none" or not STORED[kind].trained:
        cut["windows"] = min(SAMPLED, calibration.windows or SAMPLED)
    samples = Samples.record(model, thresholds, tokens, **cut)
    predictors = _predictors(model, kind, thresholds.tolist(), samples)
    usage = [samples.active(layer).float().mean(0) for layer in range(samples.layers)]

    def files(place: Path) -> None:
        save_usage(place / USAGE, name, usage)
        if kind != "none":
            save_predictors(place / PREDICTORS, name, predictors)

    return Neurons(thresholds.tolist(), needs=neurons_needed(samples, predictors)), files


def neurons_needed(samples: Samples, predictors: Sequence[Predictor | None]) -> list[int]:
    """How many neurons of each layer a token needs on average, rounded up: those predicted, or else those active."""
    needs = []
    for layer, predictor in enumerate(predictors):
        inputs = samples.inputs[layer]
        bits = samples.active(layer) if predictor is None else predictor.mask(inputs)
        needs.append(-(-int(bits.sum()) // len(inputs)))
    return needs


def _predictors(model: nn.Module, kind: str, limits: Sequence[float], samples: Samples) -> Sequence[Predictor | None]:
    if kind == "none":
        return [None] * len(limits)
    predictors = STORED[kind].fit(model, limits, samples)
    return predictors if STORED[kind].in_magnitudes else with_limits(predictors, samples, KEPT)

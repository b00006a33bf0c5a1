"""From the name of a model to a folder that `toolkit.offload.by_neuron` runs."""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import nn

from toolkit.errors import UserError, unknown
from toolkit.models import fast_dtype, load_model
from toolkit.models.blocks import cast_parameters
from toolkit.offload.by_neuron import PREDICTORS, USAGE
from toolkit.predictors import STORED, Predictor, Samples, save_predictors, with_limits
from toolkit.quality import load_tokens
from toolkit.sparsity import Magnitudes, thresholds_of
from toolkit.sparsity.calibration import Calibration
from toolkit.sparsity.statistics import save_usage
from toolkit.storage.neuron_packing import Neurons, check_packable
from toolkit.storage.packing import Pack, pack_model

KINDS = (*STORED, "none")
KEPT = 0.99  # of the magnitudes that limits keep
SAMPLED = 2  # windows at most, on which limits are chosen and neurons are counted


HeadPack = Callable[[nn.Module, object], Pack | None]


def no_head(model: nn.Module, tokenizer: object) -> None:
    """The head stays in memory as it is."""


def make_folder(
    name: str,
    folder: Path,
    zeros: float,
    kind: str,
    calibration: Calibration,
    dtype: torch.dtype | None = None,
    head: HeadPack = no_head,
) -> tuple[nn.Module, object]:
    """Write a model by neuron, with thresholds, predictors and the neurons' usage, all from calibration text.

    Args:
        name: as `load_model` takes it. A model that has thresholds of its own keeps them.
        folder: must not exist.
        zeros: the share of each layer's outputs that its threshold sets to zero. With 0 all thresholds are 0.
        kind: of predictors, one of `KINDS`.
        calibration: its first windows are taken.
        dtype: of the weights; None calculates in the quickest here and writes bfloat16.
        head: of a model and its tokenizer, what packs the head, as `pack_model` takes it.

    Returns the model and its tokenizer. Raises what `load_model`, `Magnitudes.measure`, the predictors and
    `pack` raise, and `UserError` for an unknown kind or a share outside [0, 1).
    """
    _check(zeros, kind)
    model, tokenizer = load_model(name, dtype or fast_dtype())
    tokens = load_tokens(calibration.corpus, tokenizer, "calibration")
    write_folder(model, folder, name, tokens, zeros, kind, calibration, tokenizer, dtype, head)
    return model, tokenizer


def write_folder(
    model: nn.Module,
    folder: Path,
    name: str,
    tokens: object,
    zeros: float,
    kind: str,
    calibration: Calibration,
    tokenizer: object | None = None,
    dtype: torch.dtype | None = None,
    head: HeadPack = no_head,
) -> None:
    """Write a model that is loaded, calibrated on a row of token ids; its weights are cast to `dtype`.

    The other arguments and the errors are those of `make_folder`.
    """
    _check(zeros, kind)
    check_packable(model)
    cut = {"windows": calibration.windows, "sequence_length": calibration.sequence_length}
    if (thresholds := thresholds_of(model)) is None:
        thresholds = Magnitudes.measure(model, tokens, **cut).thresholds(zeros)
    trained_on = (
        cut
        if kind != "none" and STORED[kind].trained
        else cut | {"windows": min(SAMPLED, calibration.windows or SAMPLED)}
    )
    samples = Samples.record(model, thresholds, tokens, **trained_on)
    found = _predictors(model, kind, thresholds.tolist(), samples)
    usage = [samples.active(layer).float().mean(0) for layer in range(samples.layers)]

    def files(place: Path) -> None:
        save_usage(place / USAGE, name, usage)
        if kind != "none":
            save_predictors(place / PREDICTORS, name, found)

    cast_parameters(model, dtype or torch.bfloat16)
    layout = Neurons(thresholds.tolist(), needs=neurons_needed(samples, found))
    pack_model(model, folder, layout, name, tokenizer, head=head(model, tokenizer), files=files)


def _check(zeros: float, kind: str) -> None:
    if kind not in KINDS:
        raise unknown("predictors", kind, KINDS)
    if not 0 <= zeros < 1:
        raise UserError(f"share of zeros {zeros}: expected at least 0 and less than 1")


def neurons_needed(samples: Samples, predictors: Sequence[Predictor | None]) -> list[int]:
    """How many neurons of each layer a token needs on average, rounded up: those predicted, or else those active."""
    return [_needed(samples, layer, predictor) for layer, predictor in enumerate(predictors)]


def _needed(samples: Samples, layer: int, predictor: Predictor | None) -> int:
    inputs = samples.inputs[layer]
    bits = samples.active(layer) if predictor is None else predictor.mask(inputs)
    return -(-int(bits.sum()) // len(inputs))


def _predictors(model: nn.Module, kind: str, limits: Sequence[float], samples: Samples) -> Sequence[Predictor | None]:
    if kind == "none":
        return [None] * len(limits)
    predictors = STORED[kind].fit(model, limits, samples)
    return predictors if STORED[kind].in_magnitudes else with_limits(predictors, samples, KEPT)

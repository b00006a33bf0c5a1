"""What predictors get right, and the model with them in place."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pandas as pd
import torch
from jaxtyping import Bool, Float, Float32
from torch import Tensor, nn

from toolkit.activations.thresholds import changed, fed, thresholded
from toolkit.errors import UserError
from toolkit.models.ffn import decoder_ffns
from toolkit.predictors.predictor import Predictor
from toolkit.predictors.samples import Samples


@contextmanager
def predicted(
    model: nn.Module,
    thresholds: Float32[Tensor, " layers"],
    predictors: Sequence[Predictor | None],
    criterion: str = "output",
) -> Iterator[nn.Module]:
    """Inside the block, a neuron counts only if it is predicted and exceeds the threshold of its layer.

    Raises `UserError` for predictors of another model's shape, and as `thresholded` does.
    """
    check_fits(model, predictors)
    inputs: dict[int, Tensor] = {}

    def keep(layer: int, outputs: Tensor, _: Tensor) -> Tensor | None:
        x, predictor = inputs.pop(layer), predictors[layer]
        if predictor is None:
            return None
        found = _mask(predictor, x.reshape(-1, x.shape[-1]))
        return outputs.masked_fill(~found.view(outputs.shape), 0)

    with thresholded(model, thresholds, criterion), fed(model, inputs.__setitem__), changed(model, keep):
        yield model


def check_fits(model: nn.Module, predictors: Sequence[Predictor | None]) -> None:
    """Raise `UserError` unless there is a predictor, or None, of the right shape for each FFN of the model."""
    ffns = decoder_ffns(model)
    if len(predictors) != len(ffns):
        raise UserError(f"{len(predictors)} predictors for {len(ffns)} layers: they are another model's")
    for layer, (ffn, predictor) in enumerate(zip(ffns, predictors, strict=True)):
        shape = (ffn.neurons, ffn.up.in_features)
        if predictor and predictor.shape != shape:
            raise UserError(
                f"the predictor of layer {layer} is for {predictor.shape[0]} neurons and {predictor.shape[1]} inputs; "
                f"the model has {shape[0]} and {shape[1]}: it is another model's"
            )


def quality(predictors: Sequence[Predictor | None], samples: Samples) -> pd.DataFrame:
    """What the predictors say of samples, a row for each layer.

    Columns: layer, predictor (its name, "none" where every neuron is loaded), nbytes, active and predicted (shares of
    the layer's neurons), recall (share of the active neurons that are predicted), precision (share of the predicted
    neurons that are active), false_negatives (share of the active), false_positives (share of the inactive), kept
    (what the predicted neurons have of the magnitudes of all, as `Samples.magnitudes` gives them).
    """
    return pd.DataFrame(_quality(layer, predictor, samples) for layer, predictor in enumerate(predictors))


def _quality(layer: int, predictor: Predictor | None, samples: Samples) -> dict[str, float]:
    active, magnitudes = samples.active(layer), samples.magnitudes(layer)
    found = torch.ones_like(active) if predictor is None else _mask(predictor, samples.inputs[layer])
    both = int((found & active).sum())
    row = {"layer": layer, "predictor": predictor.name if predictor else "none"}
    row |= {"nbytes": predictor.nbytes if predictor else 0}
    row |= {"active": active.float().mean().item(), "predicted": found.float().mean().item()}
    row |= {"recall": _ratio(both, active.sum()), "precision": _ratio(both, found.sum())}
    row |= {"false_negatives": 1 - row["recall"], "false_positives": _ratio((found & ~active).sum(), (~active).sum())}
    return row | {"kept": _ratio((magnitudes * found).sum(), magnitudes.sum())}


def _mask(predictor: Predictor, x: Float[Tensor, "tokens hidden"]) -> Bool[Tensor, "tokens neurons"]:
    return predictor.scores(x) > predictor.limit


def _ratio(part: Tensor | float, whole: Tensor | float) -> float:
    return float(part) / float(whole) if float(whole) else float("nan")

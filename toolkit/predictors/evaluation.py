"""The accuracy of predictors, and of the model with them in place.

A predictor with a state is stepped through each sequence, token by token. The first tokens are the sequence's prompt,
which is one token at least: all neurons are loaded for it, and what it used starts the predictor.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Float32
from torch import Tensor, nn

from toolkit.errors import UserError
from toolkit.models.ffn import decoder_ffns
from toolkit.predictors.predictor import Context, Predictor
from toolkit.predictors.samples import Samples
from toolkit.sparsity.thresholds import changed, fed, thresholded

if TYPE_CHECKING:
    import pandas as pd


@contextmanager
def predicted(
    model: nn.Module,
    thresholds: Float32[Tensor, " layers"],
    predictors: Sequence[Predictor | None],
    criterion: str = "output",
    prompt: int = 0,
) -> Iterator[nn.Module]:
    """Inside the block, a neuron counts only if it is predicted and exceeds the threshold of its layer.

    A predictor with a state observes the active neurons among those that it predicted, as in an engine, since no others
    are computed. Each row of a forward pass is a sequence of its own. All neurons are loaded for its first `prompt`
    tokens. Raises `UserError` for predictors of another model's shape, and as `thresholded` does.
    """
    check_fits(model, predictors)
    inputs: dict[int, Tensor] = {}
    sequences: list[_Sequence] = []

    def keep(layer: int, outputs: Tensor, _: Tensor) -> Tensor | None:
        x, predictor = inputs.pop(layer), predictors[layer]
        if any(one and one.stateful for one in predictors):
            if layer == 0:
                sequences[:] = [_Sequence(x.shape[-2], prompt, sees_all=False) for _ in range(x[..., 0, 0].numel())]
            rows = zip(sequences, _by_sequence(x), _by_sequence(outputs != 0), strict=True)
            mask = torch.stack([sequence.mask(layer, predictor, *row) for sequence, *row in rows])
        elif predictor is None:
            return None
        else:
            mask = predictor.mask(x.reshape(-1, x.shape[-1]))
        mask = mask.view(outputs.shape)
        mask[..., :prompt, :] = True
        return outputs.masked_fill(~mask, 0)

    with thresholded(model, thresholds, criterion), fed(model, inputs.__setitem__), changed(model, keep):
        yield model


class _Sequence:
    """The knowledge of predictors about the tokens of one sequence, layer after layer.

    All neurons are loaded for the first `prompt` tokens, or for one. With `sees_all` predictors observe all active
    neurons, else those that they predicted.
    """

    def __init__(self, tokens: int, prompt: int, sees_all: bool):
        self.prompt, self.sees_all = max(1, prompt), sees_all
        self.inputs, self.active = ([[] for _ in range(tokens)] for _ in range(2))

    def mask(
        self,
        layer: int,
        predictor: Predictor | None,
        x: Float[Tensor, "tokens hidden"],
        active: Bool[Tensor, "tokens neurons"],
    ) -> Bool[Tensor, "tokens neurons"]:
        """Which neurons are predicted in the next layer."""
        for inputs, row in zip(self.inputs, x, strict=True):
            inputs.append(row)
        if predictor is not None and predictor.stateful:
            return self._stepped(layer, predictor, active)
        mask = torch.ones_like(active) if predictor is None else predictor.mask(x)
        for neurons, row in zip(self.active, (active if self.sees_all else active & mask).numpy(), strict=True):
            neurons.append(np.flatnonzero(row))
        return mask

    def _stepped(
        self, layer: int, predictor: Predictor, active: Bool[Tensor, "tokens neurons"]
    ) -> Bool[Tensor, "tokens neurons"]:
        mask = np.ones(active.shape, bool)
        used = [np.flatnonzero(row) for row in active[: self.prompt].numpy()]
        predictor.start(used)
        for token in range(self.prompt, len(active)):
            mask[token] = False
            mask[token, predictor.predict(Context(layer, self.inputs[token], self.active[token]))] = True
            truth = active[token].numpy()
            used.append(np.flatnonzero(truth if self.sees_all else truth & mask[token]))
            predictor.observe(used[-1])
        for neurons, one in zip(self.active, used, strict=True):
            neurons.append(one)
        return torch.from_numpy(mask)


def _by_sequence(values: Tensor) -> Tensor:
    """[..., tokens, width] → [sequences, tokens, width]."""
    return values.reshape(-1, *values.shape[-2:])


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


def prediction_quality(predictors: Sequence[Predictor | None], samples: Samples, prompt: int = 0) -> "pd.DataFrame":
    """The predictors' scores on samples, one row per layer.

    Columns: layer, predictor (its name, "none" where every neuron is loaded), nbytes, active and predicted (shares of
    the layer's neurons), accuracy (share of all neurons that are predicted rightly, active or not), recall (share of
    the active neurons that are predicted), precision (share of the predicted neurons that are active), false_negatives
    (share of the active), false_positives (share of the inactive), kept (what the predicted neurons have of the
    magnitudes of all, as `Samples.magnitudes` gives them).

    A predictor with a state observes all neurons that were active, predicted or not. The first `prompt` tokens of each
    sequence are not counted, whatever the predictor. Raises `UserError` if there are no others.
    """
    import pandas as pd  # not needed to run a model

    length = samples.length or len(samples.inputs[0])
    if not 0 <= prompt < length:
        raise UserError(f"prompt of {prompt} tokens: expected fewer than the {length} of a sequence")
    sequences: list[_Sequence] = []
    if any(predictor and predictor.stateful for predictor in predictors):
        lengths = map(len, samples.inputs[0].split(length))
        sequences = [_Sequence(tokens, prompt, sees_all=True) for tokens in lengths]
    counted = torch.arange(len(samples.inputs[0])) % length >= prompt
    return pd.DataFrame(_quality(layer, one, samples, sequences, counted) for layer, one in enumerate(predictors))


def _quality(
    layer: int,
    predictor: Predictor | None,
    samples: Samples,
    sequences: Sequence[_Sequence],
    counted: Bool[Tensor, " tokens"],
) -> dict[str, Any]:
    active, magnitudes = samples.active(layer)[counted], samples.magnitudes(layer)[counted]
    mask = _mask(layer, predictor, samples, sequences)[counted]
    both = int((mask & active).sum())
    row = {"layer": layer, "predictor": predictor.name if predictor else "none"}
    row |= {"nbytes": predictor.nbytes if predictor else 0}
    row |= {"active": active.float().mean().item(), "predicted": mask.float().mean().item()}
    row |= {"accuracy": (mask == active).float().mean().item()}
    row |= {"recall": _ratio(both, active.sum()), "precision": _ratio(both, mask.sum())}
    row |= {"false_negatives": 1 - row["recall"], "false_positives": _ratio((mask & ~active).sum(), (~active).sum())}
    return row | {"kept": _ratio((magnitudes * mask).sum(), magnitudes.sum())}


def _mask(
    layer: int, predictor: Predictor | None, samples: Samples, sequences: Sequence[_Sequence]
) -> Bool[Tensor, "tokens neurons"]:
    x, active = samples.inputs[layer], samples.active(layer)
    if sequences:
        length = samples.length or len(x)
        rows = zip(sequences, x.split(length), active.split(length), strict=True)
        return torch.cat([sequence.mask(layer, predictor, *row) for sequence, *row in rows])
    return torch.ones_like(active) if predictor is None else predictor.mask(x)


def _ratio(part: Tensor | float, whole: Tensor | float) -> float:
    return float(part) / float(whole) if float(whole) else float("nan")

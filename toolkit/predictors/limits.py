"""Limits of predictors, chosen on samples: how much is predicted, and how much is missed."""

from collections.abc import Sequence

import torch

from toolkit.errors import UserError
from toolkit.predictors.predictor import Predictor
from toolkit.predictors.samples import Samples

TOKENS = 1024  # that are enough to choose a limit for a layer


def with_limits(predictors: Sequence[Predictor], samples: Samples, kept: float) -> list[Predictor]:
    """The predictors, each with the highest limit at which it keeps a share `kept` of its layer's magnitudes.

    A neuron's magnitude is the length of what it adds to the hidden state. So missing a small one costs little, which
    is what the paper sees of its false negatives (appendix C.1). A score as high as the limit is not predicted; the
    limit is set just below the last score that is needed. Raises `UserError` for a share outside (0, 1).
    """
    if not 0 < kept < 1:
        raise UserError(f"kept {kept!r}: expected a share of the magnitudes between 0 and 1")
    return [predictor.at(_limit(predictor, samples, layer, kept)) for layer, predictor in enumerate(predictors)]


def _limit(predictor: Predictor, samples: Samples, layer: int, kept: float) -> float:
    scores = predictor.scores(samples.inputs[layer][:TOKENS]).flatten()
    magnitudes = samples.magnitudes(layer)[:TOKENS].flatten()
    active = magnitudes.nonzero().squeeze(1)  # the others add nothing, and to sort them takes most of the time
    if not len(active):
        return scores.max().item()
    order = active[scores[active].argsort(descending=True)]
    total = magnitudes[order].double().cumsum(0)
    last = scores[order[int((total < kept * total[-1]).sum())]]
    return torch.nextafter(last, torch.tensor(-torch.inf)).item()

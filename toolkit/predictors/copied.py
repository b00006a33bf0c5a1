"""Predictors that are copied from a model's own weights: they need no training."""

from collections.abc import Iterable

from torch import nn

from toolkit.models.activation import activation_name
from toolkit.models.ffn import decoder_ffns
from toolkit.predictors.few_bits import FewBits
from toolkit.predictors.gate import Gate
from toolkit.predictors.predictor import Predictor

COPIED: dict[str, type[Gate] | type[FewBits]] = {kind.name: kind for kind in (Gate, FewBits)}


def copied(kind: str, model: nn.Module, limits: Iterable[float]) -> list[Predictor]:
    """A predictor of each layer, of a kind of `COPIED`, with the layer's limit.

    Raises `UserError` for FFNs that the kind has no place for, and `ValueError` for another number of limits.
    """
    act = activation_name(model)
    return [COPIED[kind].of(ffn, act, limit) for ffn, limit in zip(decoder_ffns(model), limits, strict=True)]

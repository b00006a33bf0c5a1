"""Thresholds on FFN neurons as part of a model: outputs that do not exceed their layer's threshold are zero.

The output of a neuron is what the down projection takes in: act(gate) · up, or act(up) without a gate. With a threshold
of 0 only a ReLU's own zeros are cut. The thresholds stand in the model's config, as `activation_thresholds`: a list
with a number for each decoder block. `load_model` puts them in place, so a saved model keeps them.
"""

import math
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from jaxtyping import Float32
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from toolkit.errors import UserError
from toolkit.models.ffn import FFN, decoder_ffns

ENTRY = "activation_thresholds"  # of a model's config


def thresholds_of(model: nn.Module) -> Float32[Tensor, " layers"] | None:
    """The thresholds in a model's config; None for a dense model.

    Raises `UserError` if the config's entry is no list with a finite number, at least 0, for each decoder block.
    """
    found = getattr(model.config, ENTRY, None)
    if found is None:
        return None
    layers = len(decoder_ffns(model))
    good = isinstance(found, list) and all(isinstance(it, int | float) and 0 <= it < math.inf for it in found)
    if not good or len(found) != layers:
        raise UserError(f"{ENTRY} of the model's config: expected a list of {layers} finite numbers, at least 0")
    return torch.tensor(found, dtype=torch.float32)


def cut_for_good(model: nn.Module) -> None:
    """Have a model's FFNs cut their neurons as its config says, if it does. Raises `UserError` as `thresholds_of`."""
    thresholds = thresholds_of(model)
    if thresholds is not None:
        hook_thresholds(model, thresholds)


def hook_thresholds(model: nn.Module, thresholds: Float32[Tensor, " layers"]) -> list[RemovableHandle]:
    """Have each FFN of a model cut its neurons; `attached` undoes it at the end of a block.

    Raises `UserError` for an unknown FFN, or another number of thresholds than blocks.
    """
    ffns = decoder_ffns(model)
    if len(thresholds) != len(ffns):
        raise UserError(f"{len(thresholds)} thresholds for {len(ffns)} decoder blocks: they are another model's")
    return [hook_threshold(ffn, float(limit)) for ffn, limit in zip(ffns, thresholds, strict=True)]


def hook_threshold(ffn: FFN, limit: float) -> RemovableHandle:
    """Have an FFN set outputs of neurons to zero that do not exceed a limit."""
    return ffn.down.register_forward_pre_hook(partial(_cut, limit))


@contextmanager
def attached(handles: Iterable[RemovableHandle]) -> Iterator[None]:
    """Remove hooks at the end of the block."""
    with ExitStack() as stack:
        for handle in handles:
            stack.enter_context(handle)
        yield


def _cut(limit: float, _: nn.Module, args: tuple[Any, ...]) -> tuple[Tensor]:
    (outputs,) = args
    return (outputs.masked_fill(outputs.float().abs() <= limit, 0),)  # a NaN stays

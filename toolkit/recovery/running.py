"""Thresholds that follow a running quantile of a model's own activations."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Float32, Int64
from torch import Tensor, nn

from toolkit.activations.thresholds import run_decoder
from toolkit.errors import UserError
from toolkit.models.cutting import attached
from toolkit.models.ffn import decoder_ffns
from toolkit.progress import progress
from toolkit.pruning.calibration import checked_windows

SAMPLE = 1 << 16  # magnitudes of a batch that a quantile is taken of


def quantile(outputs: Float[Tensor, "..."], zeros: float) -> float:
    """The smallest of (a regular sample of) the magnitudes that at least a share `zeros` of them does not exceed."""
    magnitudes = outputs.detach().flatten().abs().float()
    sample = magnitudes[:: max(1, len(magnitudes) // SAMPLE)]
    return sample.kthvalue(max(1, round(zeros * len(sample)))).values.item()


class RunningThresholds:
    """A threshold for each layer, drawn towards the quantile of each batch that runs under `applied`.

    Args:
        limits: the thresholds to start from; they are changed in place.
        zeros: the share of zeros of each layer.
        rate: how far a batch draws a threshold towards its own quantile, from 0 (not at all) to 1.
    """

    def __init__(self, limits: Float32[Tensor, " layers"], zeros: Sequence[float], rate: float):
        self.limits, self.zeros, self.rate = limits, zeros, rate

    @contextmanager
    def applied(self, model: nn.Module) -> Iterator[None]:
        """Inside the block the model's FFNs cut their neurons, and the thresholds follow."""
        ffns = decoder_ffns(model)
        with attached(ffn.down.register_forward_pre_hook(partial(self._cut, at)) for at, ffn in enumerate(ffns)):
            yield

    def _cut(self, layer: int, _: nn.Module, args: tuple[Any, ...]) -> tuple[Tensor]:
        (outputs,) = args
        found = quantile(outputs, self.zeros[layer])
        self.limits[layer] += self.rate * (found - self.limits[layer])
        return (outputs.masked_fill(outputs.abs() <= self.limits[layer].item(), 0),)


@torch.no_grad()
def settle(
    model: nn.Module, windows: Int64[Tensor, "windows tokens"], zeros: Sequence[float]
) -> Float32[Tensor, " layers"]:
    """The thresholds that give each layer its share of zeros with those of all other layers in place.

    Each is the mean over the windows of a window's quantile. Raises `UserError` for another number of shares than
    layers, a share outside [0, 1), or windows that do not fit the model.
    """
    check_shares(model, zeros)
    windows = checked_windows(model, windows)
    running = RunningThresholds(torch.zeros(len(zeros)), zeros, 1.0)
    with running.applied(model), progress("fitting thresholds", len(windows), "windows") as bar:
        for number, window in enumerate(windows, start=1):
            running.rate = 1 / number
            run_decoder(model, window)
            bar.update()
    return running.limits


def check_shares(model: nn.Module, zeros: Sequence[float]) -> None:
    """Raise `UserError` unless there is a share of zeros in [0, 1) for each layer."""
    if len(zeros) != (layers := len(decoder_ffns(model))):
        raise UserError(f"{len(zeros)} shares of zeros for {layers} layers: give one each")
    if wrong := [share for share in zeros if not 0 <= share < 1]:
        raise UserError(f"share of zeros {wrong[0]!r}: expected at least 0 and less than 1")

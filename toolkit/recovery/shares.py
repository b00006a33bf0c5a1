"""Shares of zeros for the layers of a model, by what zeros cost each of them."""

from collections.abc import Sequence
from itertools import pairwise

import torch
from jaxtyping import Float64, Int64
from torch import Tensor, nn

from toolkit.activations import Magnitudes, share_out
from toolkit.activations.sensitivity import fisher_losses
from toolkit.errors import UserError

LEVELS = (0.6, 0.72, 0.84, 0.96)  # where losses are foretold
STEPS = 12  # that lie between two of these


def shares(model: nn.Module, windows: Int64[Tensor, "windows tokens"], zeros: Sequence[float]) -> list[list[float]]:
    """For each mean share of zeros in `zeros`, the share of every layer.

    Raises `UserError` for a share outside of `LEVELS`, or windows that do not fit the model.
    """
    check_range(zeros)
    sizes = Magnitudes.measure(model, windows.flatten(), len(windows), windows.shape[1])
    return shares_of(fisher_losses(model, sizes, windows, LEVELS), zeros)


def shares_of(losses: Float64[Tensor, "layers levels"], zeros: Sequence[float]) -> list[list[float]]:
    """The same from the layers' losses at `LEVELS`. Raises `UserError` for a share outside of these."""
    check_range(zeros)
    levels, between = finer(LEVELS, losses)
    return [share_out(between, levels, share) for share in zeros]


def check_range(zeros: Sequence[float]) -> None:
    """Raise `UserError` for a share outside of `LEVELS`."""
    if wrong := [share for share in zeros if not LEVELS[0] <= share <= LEVELS[-1]]:
        raise UserError(f"share of zeros {wrong[0]}: expected one from {LEVELS[0]} to {LEVELS[-1]}")


def finer(
    levels: Sequence[float], losses: Float64[Tensor, "layers levels"]
) -> tuple[list[float], Float64[Tensor, "layers finer"]]:
    """Losses at `STEPS` times as many levels; between two levels the logarithm of a loss grows evenly."""
    parts = torch.arange(STEPS, dtype=torch.float64) / STEPS
    found = [low + (high - low) * part for low, high in pairwise(levels) for part in parts.tolist()]
    logs = losses.clamp(min=torch.finfo(torch.float64).tiny).log()
    between = [low[:, None] * (1 - parts) + high[:, None] * parts for low, high in pairwise(logs.unbind(1))]
    return [*found, levels[-1]], torch.cat([*between, logs[:, -1:]], dim=1).exp()

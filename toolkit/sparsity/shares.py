"""The share of zeros of each layer: more for layers that lose little by zeros, as estimated by one backward pass."""

import heapq
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor, nn
from torch.nn import functional

from toolkit.errors import UserError
from toolkit.models.cutting import attached
from toolkit.models.ffn import FFN, decoder_ffns
from toolkit.progress import progress
from toolkit.sparsity.calibration import checked_windows
from toolkit.sparsity.thresholds import Magnitudes

LEVELS = (0.6, 0.72, 0.84, 0.96)  # where losses are foretold
STEPS = 12  # that lie between two of these
TOLERANCE = 1e-9


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


def share_out(losses: Float[Tensor, "layers levels"], levels: Sequence[float], zeros: float) -> list[float]:
    """The share of zeros of each layer, whose mean is `zeros` or, by less than one step, above it.

    Every layer starts at the lowest level. In each step, the layer whose loss rises the least goes one level up (TEAL:
    Liu et al., 2024, algorithm 1). `losses[layer, level]` is what a layer adds to the loss at that level; `levels` rise
    by equal steps, so that every step up gives as many zeros. The result is optimal at these levels if each layer's
    loss is convex and losses of layers add up.
    """
    table = losses.tolist()
    at = [0] * len(table)
    steps_up = [(row[1] - row[0], layer) for layer, row in enumerate(table)]
    heapq.heapify(steps_up)
    while sum(levels[level] for level in at) < zeros * len(at) - TOLERANCE:
        _, layer = heapq.heappop(steps_up)
        at[layer] += 1
        if at[layer] + 1 < len(levels):
            heapq.heappush(steps_up, (table[layer][at[layer] + 1] - table[layer][at[layer]], layer))
    return [levels[level] for level in at]


def fisher_losses(
    model: nn.Module,
    sizes: Magnitudes,
    windows: Int64[Tensor, "windows tokens"],
    levels: Sequence[float],
    seed: int = 0,
) -> Float64[Tensor, "layers levels"]:
    """The divergence, in nats a token, that each layer adds if it alone has each share of zeros in `levels`, foretold.

    A small error e of an FFN's output at a token moves the model's distributions by about ½·(g·e)² nats of divergence,
    where g is the gradient of the log-likelihood of text that the model itself draws: the Fisher information to the
    second order. `seed` is of the text drawn. Errors of unlike tokens are taken for independent. Raises `UserError` for
    windows that do not fit the model, and as `Magnitudes.thresholds` does.
    """
    windows = checked_windows(model, windows)
    ffns, limits = decoder_ffns(model), torch.stack([sizes.thresholds(level) for level in levels], dim=1)
    losses = torch.zeros(limits.shape, dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)

    def see(layer: int, _: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        output = output if output.requires_grad else output.detach().requires_grad_()
        output.register_hook(lambda gradient: _add(losses[layer], ffns[layer], args[0], limits[layer], gradient))
        return output

    hooks = (ffn.down.register_forward_hook(partial(see, layer)) for layer, ffn in enumerate(ffns))
    with attached(hooks), torch.enable_grad(), progress("foretelling losses", len(windows), "windows") as bar:
        for window in windows:
            logits = model(window[None].to(model.device), use_cache=False).logits[0].float()
            drawn = torch.multinomial(logits.detach().softmax(-1).cpu(), 1, generator=generator).squeeze(1)
            functional.cross_entropy(logits, drawn.to(logits.device), reduction="sum").backward()
            bar.update()
    return losses / (2 * windows.numel())


@torch.no_grad()
def _add(
    losses: Float64[Tensor, " levels"],
    ffn: FFN,
    outputs: Float[Tensor, "... neurons"],
    limits: Float[Tensor, " levels"],
    gradient: Float[Tensor, "... hidden"],
) -> None:
    """Add (g·e)² of every token to the losses of a layer; e is what the down projection loses at a threshold."""
    pulled = gradient.float() @ ffn.down.weight.float()  # g·(W x) = (gᵀW)·x
    parts = pulled * outputs.float()
    for level, limit in enumerate(limits.tolist()):
        lost = parts.masked_fill(outputs.float().abs() > limit, 0).sum(-1)
        losses[level] += lost.double().square().sum().item()

"""The cost of thresholds in each layer, predicted from one backward pass.

A small error e of an FFN's output at a token moves the model's distributions by about ½·(g·e)² nats of divergence,
where g is the gradient of the log-likelihood of text that the model itself draws: the Fisher information to the second
order. `threshold_losses` measures the same thing, with a pass for every layer and level.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor, nn
from torch.nn import functional

from toolkit.activations.thresholds import Magnitudes
from toolkit.models.cutting import attached
from toolkit.models.ffn import FFN, decoder_ffns
from toolkit.progress import progress
from toolkit.pruning.calibration import checked_windows


def fisher_losses(
    model: nn.Module,
    sizes: Magnitudes,
    windows: Int64[Tensor, "windows tokens"],
    levels: Sequence[float],
    seed: int = 0,
) -> Float64[Tensor, "layers levels"]:
    """The divergence, in nats a token, that each layer adds if it alone has each share of zeros in `levels`, foretold.

    `seed` is of the text drawn. Errors of unlike tokens are taken for independent. Raises `UserError` for windows that
    do not fit the model, and as `Magnitudes.thresholds` does.
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

"""Another activation for a model with a gate: FATReLU, x where x exceeds a limit and else 0; ReLU where the limit is 0.

LLM in a flash (sections 3 and C.5) runs models that were trained with these. Here they are put in without training.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from jaxtyping import Float32, Int64
from torch import Tensor, nn

from toolkit.activations.thresholds import run_decoder
from toolkit.errors import UserError
from toolkit.models.blocks import decoder_blocks
from toolkit.models.cutting import attached
from toolkit.models.ffn import decoder_ffns

ACTIVATIONS = ("act_fn", "activation_fn", "act")  # what blocks call theirs


@contextmanager
def fatrelu(model: nn.Module, limits: Float32[Tensor, " layers"]) -> Iterator[nn.Module]:
    """Inside the block, the activation of each decoder block is a FATReLU with its limit.

    Raises `UserError` for another number of limits than blocks, or a block without a known activation.
    """
    blocks = decoder_blocks(model)
    if len(limits) != len(blocks):
        raise UserError(f"{len(limits)} limits for {len(blocks)} decoder blocks: they are another model's")
    holders = [_holder(block, number) for number, block in enumerate(blocks)]
    kept = [getattr(*holder) for holder in holders]
    try:
        for (module, name), limit in zip(holders, limits.tolist(), strict=True):
            setattr(module, name, nn.Threshold(limit, 0.0))
        yield model
    finally:
        for (module, name), activation in zip(holders, kept, strict=True):
            setattr(module, name, activation)


@torch.no_grad()
def gate_limits(model: nn.Module, windows: Int64[Tensor, "windows tokens"], zeros: float) -> Float32[Tensor, " layers"]:
    """The limits of FATReLU that a share of each layer's gates does not exceed (of its up projection without a gate).

    They are the mean of the windows' quantiles, with the model's own activation in place.
    """
    ffns = decoder_ffns(model)
    limits = torch.zeros(len(ffns))

    def see(layer: int, _: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        values = output.float().flatten()
        limits[layer] += values.kthvalue(max(1, round(zeros * len(values)))).values.cpu() / len(windows)

    gates = enumerate(ffn.gate or ffn.up for ffn in ffns)
    with attached(gate.register_forward_hook(partial(see, layer)) for layer, gate in gates):
        for window in windows:
            run_decoder(model, window)
    return limits


def _holder(block: nn.Module, number: int) -> tuple[nn.Module, str]:
    """The module in a block that has the activation, and its attribute."""
    for module in block.modules():
        for name in ACTIVATIONS:
            if callable(getattr(module, name, None)):
                return module, name
    raise UserError(f"block {number} has no activation named {', '.join(ACTIVATIONS)}; add its name to ACTIVATIONS")

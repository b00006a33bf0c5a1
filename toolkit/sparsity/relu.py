"""Another activation for a model with a gate: FATReLU, x where x exceeds a limit and else 0; ReLU where the limit is 0.

LLM in a flash (sections 3 and C.5) runs models that were trained with these. Here they are put in without
training; `toolkit.recovery` trains with ReLU.
"""

from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from jaxtyping import Float32, Int64
from torch import Tensor, nn

from toolkit.models.activation import replaced
from toolkit.models.cutting import attached
from toolkit.models.ffn import decoder_ffns
from toolkit.sparsity.calibration import checked_windows
from toolkit.sparsity.thresholds import run_decoder


def fatrelu(model: nn.Module, limits: Float32[Tensor, " layers"]) -> AbstractContextManager[nn.Module]:
    """Inside the block, the activation of each decoder block is a FATReLU with its limit.

    Raises `UserError` for another number of limits than blocks, or a block without a known activation.
    """
    return replaced(model, [nn.Threshold(limit, 0.0) for limit in limits.tolist()])


@torch.no_grad()
def gate_limits(model: nn.Module, windows: Int64[Tensor, "windows tokens"], zeros: float) -> Float32[Tensor, " layers"]:
    """The limits of FATReLU that a share of each layer's gates does not exceed (of its up projection without a gate).

    They are the mean of the windows' quantiles, with the model's own activation in place. Raises `UserError` for
    windows that do not fit the model.
    """
    ffns, windows = decoder_ffns(model), checked_windows(model, windows)
    limits = torch.zeros(len(ffns))

    def see(layer: int, _: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        values = output.float().flatten()
        limits[layer] += values.kthvalue(max(1, round(zeros * len(values)))).values.cpu() / len(windows)

    gates = enumerate(ffn.gate or ffn.up for ffn in ffns)
    with attached(gate.register_forward_hook(partial(see, layer)) for layer, gate in gates):
        for window in windows:
            run_decoder(model, window)
    return limits

"""Symmetric round-to-nearest quantisation, the weights' side of SmoothQuant (Xiao et al. 2023, equation 1)."""

import torch
from jaxtyping import Float, Int8
from torch import Tensor


def absmax_int8(weight: Float[Tensor, "rows columns"]) -> Int8[Tensor, "rows columns"]:
    """Each row over its largest magnitude, times 127, rounded. Zeros stay zeros; small weights join them."""
    values = weight.float()
    scale = values.abs().amax(dim=1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny) / 127
    return (values / scale).round().to(torch.int8)

"""Symmetric round-to-nearest quantisation, the weights' side of SmoothQuant (Xiao et al. 2023, equation 1).

All code that unpacks int8 weights follows one rule: a weight is `values.to(dtype) * scales`, rounded once, where
`dtype` is the type that the weight had before. Scales are of that type, too.
"""

import torch
from jaxtyping import Float, Int8
from torch import Tensor

from toolkit.errors import UserError

LARGEST = 127


def row_scales(weight: Float[Tensor, "rows columns"]) -> Float[Tensor, " rows"]:
    """The value of the integer 1 in each row: the row's largest magnitude over 127, in the weight's type.

    The scale of a row of zeros is 1. A row near the type's largest number gets a scale that is rounded down, so that
    127 times the scale does not overflow.

    Raises `UserError` for a weight that is not finite.
    """
    largest = weight.float().abs().amax(dim=1) if weight.shape[1] else torch.zeros(len(weight))
    if not largest.isfinite().all():
        raise UserError("cannot quantise a weight that is not finite; load the model anew")
    scales = (largest / LARGEST).to(weight.dtype).clamp_(max=_largest_scale(weight.dtype))
    return scales.masked_fill(scales == 0, 1)  # rows too small for a float16 scale become zeros


def _largest_scale(dtype: torch.dtype) -> float:
    """The largest number of the type that can be multiplied by 127."""
    limits = torch.finfo(dtype)
    nearest = torch.tensor(limits.max / LARGEST, dtype=torch.float64).to(dtype)
    return float(nearest) if (nearest * LARGEST).isfinite() else float(nearest) * (1 - limits.eps)


def absmax_int8(
    weight: Float[Tensor, "rows columns"], scales: Float[Tensor, " rows"] | None = None
) -> Int8[Tensor, "rows columns"]:
    """Each row over its scale, rounded; `row_scales` if none are given. Zeros stay zeros; small weights become zero."""
    scales = row_scales(weight) if scales is None else scales
    return (weight.float() / scales.float()[:, None]).round_().clamp_(-LARGEST, LARGEST).to(torch.int8)


def dequantise(
    values: Int8[Tensor, "rows columns"],
    scales: Float[Tensor, " rows"],
    out: Float[Tensor, "rows columns"] | None = None,
) -> Float[Tensor, "rows columns"]:
    """int8 values times the scale of their row, in the scales' type. `out` avoids an allocation."""
    out = torch.empty(values.shape, dtype=scales.dtype, device=values.device) if out is None else out
    return out.copy_(values).mul_(scales[:, None])

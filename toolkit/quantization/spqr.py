"""3-bit weights with two levels of statistics and outliers: Dettmers et al., "SpQR", 2023, without its GPTQ updates.

Sixteen consecutive weights of a row share a scale and a zero point. These are quantised to 3 bits, too, with statistics
that sixteen rows share. Weights are rounded to the nearest level; nothing compensates for the error.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Float16, Int64
from torch import Tensor
from torch.nn import functional

from toolkit.errors import UserError
from toolkit.kernels.spqr import LEVELS, TILE, Codes, tiles

LARGEST = LEVELS - 1
LARGEST_ZERO = 1024  # a larger zero point of statistics would leave no bits of fp16 to their codes


@dataclass(frozen=True, eq=False)
class Quantised:
    """A matrix as codes, and the outliers that are added to what the codes stand for."""

    codes: Codes
    rows: Int64[Tensor, " count"]
    columns: Int64[Tensor, " count"]
    values: Float16[Tensor, " count"]


def round_to_nearest(weight: Float[Tensor, "rows columns"], outliers: float = 0.01) -> Quantised:
    """Quantise a matrix; `outliers` is the share of weights that keep 16 bits.

    Outliers are the weights without which the rest of their group is rounded with the least squared error: the
    leave-one-out criterion of SpQR, every input counting alike. Each keeps what its code misses.

    Raises `UserError` for a weight that is not finite or too large for fp16, and for a share outside 0 to 1.
    """
    if not 0 <= outliers <= 1:
        raise UserError(f"a share of outliers of {outliers} is impossible; choose one from 0 to 1")
    if weight.numel() and not float(weight.abs().max()) <= torch.finfo(torch.float16).max:
        raise UserError("cannot quantise a weight that is not finite or too large for fp16; load the model anew")
    (rows, columns), (tall, wide) = weight.shape, tiles(tuple(weight.shape))
    padding = (0, wide * TILE - columns, 0, tall * TILE - rows)
    inside = functional.pad(torch.ones(rows, columns, dtype=torch.bool), padding)
    groups = functional.pad(weight.float(), padding).view(tall * TILE, wide, TILE)
    kept = _without_outliers(groups, inside.view(groups.shape), round(outliers * weight.numel()))
    scale_codes, scales, of_scales = _statistics(_scales(groups, kept)[0])
    zero_codes, zeros, of_zeros = _statistics(_scales(groups, kept)[1])
    levels = _levels(groups, scales.float()[..., None], zeros.float()[..., None])
    dense = scales[..., None] * (levels.half() - zeros[..., None])
    cut = [part[:rows].to(torch.uint8).contiguous() for part in (scale_codes, zero_codes)]
    second_order = torch.stack([of_scales[0], of_zeros[0], of_scales[1], of_zeros[1]], dim=-1)
    levels, dense, kept = (part.reshape(tall * TILE, wide * TILE)[:rows, :columns] for part in (levels, dense, kept))
    places = (~kept).nonzero(as_tuple=True)
    values = (weight.float() - dense.float())[places].half()
    return Quantised(Codes(levels.to(torch.uint8).contiguous(), *cut, second_order), *places, values)


def _without_outliers(groups: Tensor, inside: Tensor, count: int) -> Bool[Tensor, "rows wide 16"]:
    """Which weights are no outliers: all but the `count` whose absence lowers their group's error most."""
    if not count:
        return inside
    before = _errors(groups, inside)
    gains = torch.full(groups.shape, -torch.inf)
    for column in range(TILE):
        rest = inside.clone()
        rest[..., column] = False
        gains[..., column] = before - _errors(groups, rest)
    gains[~inside] = -torch.inf
    kept = inside.clone()
    kept.view(-1)[gains.view(-1).topk(count).indices] = False
    return kept


def _errors(groups: Tensor, kept: Tensor) -> Float[Tensor, "rows wide"]:
    """The squared error of rounding what is kept of each group, with statistics that are not quantised themselves."""
    scales, zeros = (part[..., None] for part in _scales(groups, kept))
    return ((groups - scales * (_levels(groups, scales, zeros) - zeros)).square() * kept).sum(-1)


def _scales(groups: Tensor, kept: Tensor) -> tuple[Float[Tensor, "rows wide"], Float[Tensor, "rows wide"]]:
    """Scale and zero point with which the levels span what is kept of each group, and zero."""
    some = groups * kept
    low, high = some.amin(-1).clamp(max=0), some.amax(-1).clamp(min=0)
    scales = (high - low) / LARGEST
    scales = torch.where(scales > 0, scales, 1)
    return scales, -low / scales


def _levels(groups: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    """The nearest level of each weight; 0 where the scale is 0."""
    return (groups / scales + zeros).nan_to_num(0, LARGEST, 0).round().clamp(0, LARGEST)


def _statistics(values: Float[Tensor, "rows wide"]) -> tuple[Tensor, Float16[Tensor, "rows wide"], list[Tensor]]:
    """Quantise scales or zero points, sixteen rows together.

    Returns the codes, what they stand for in fp16, and the scale and zero point of each tile in fp16.
    """
    tile = values.view(len(values) // TILE, TILE, values.shape[1])
    low, high = tile.amin(1), tile.amax(1)
    scale = torch.maximum((high - low) / LARGEST, high.abs() / LARGEST_ZERO).half()
    scale = torch.where(scale > 0, scale, torch.finfo(torch.float16).smallest_normal)
    zero = (-low / scale.float()).half()
    codes = _levels(tile, scale.float()[:, None], zero.float()[:, None])
    found = scale[:, None] * (codes.half() - zero[:, None])
    return codes.view(values.shape), found.view(values.shape), [scale, zero]

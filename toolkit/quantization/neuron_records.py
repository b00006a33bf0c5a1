"""Neurons in 4 or 2 bits, each a record that stands alone: the layout is `toolkit.kernels.neurons.records`.

CORM (section 5, "Implementation") quantises experts by HQQ: 4 bits in groups of 64, and 2 bits in groups of 16 for
experts that are seldom used, with scales in 8 bits. There a group of scales may span rows. Here scales and zero points
are in 8 bits within a neuron's gate row, up row and down column, so that a neuron can be read, kept and multiplied
without its neighbours. For the down projection, groups then lie along the outputs.
"""

from collections.abc import Callable
from typing import TypeAlias

import torch
from jaxtyping import Float, Float32, UInt8
from torch import Tensor

from toolkit.errors import UserError
from toolkit.extras import extra
from toolkit.kernels.neurons.records import (
    BLOCK,
    FIELDS,
    HEAD_BYTES,
    LANES,
    SECTIONS,
    codes_start,
    group_of,
    groups,
    record_bytes,
    section_bytes,
)

__all__ = ["decode", "encode", "record_bytes"]

AT_ONCE = 512  # neurons; the package stops its steps by the mean error of what it is given
STEPS = 255  # of an 8-bit code
Grid: TypeAlias = Callable[[Tensor, int], tuple[Tensor, Tensor]]
NARROW = 1e-4  # the package gives up on a group whose weights differ by no more than this


def encode(
    gate: Float[Tensor, "neurons hidden"],
    up: Float[Tensor, "_ _"],
    down_transposed: Float[Tensor, "_ _"],
    bits: int = 4,
    grid: Grid | None = None,
) -> UInt8[Tensor, "neurons stride"]:
    """Quantise the neurons of three matrices of one shape.

    `grid` chooses scales and zero points, which then get 8 bits each; None: `half_quadratic`. Codes are the nearest
    ones for these 8 bits. The package looks at 512 neurons at once, so the same 512 give the same records.

    Raises `UserError` for bits other than 4 and 2, a `hidden` that 64 does not divide, matrices of different shapes,
    and weights that are not finite, or whose group has a scale or zero point that fp16 cannot hold (large weights, or
    nearly equal ones far from zero).
    """
    parts = {"gate": gate, "up": up, "down_transposed": down_transposed}
    if gate.ndim != 2 or any(part.shape != gate.shape for part in parts.values()):
        shapes = ", ".join(f"{name} {list(part.shape)}" for name, part in parts.items())
        raise UserError(f"matrices are {shapes}; expected the same [neurons, hidden] for all (transpose down)")
    neurons, hidden = gate.shape
    records = torch.zeros(neurons, record_bytes(hidden, bits), dtype=torch.uint8)
    for name, part in parts.items():
        if not part.isfinite().all():
            raise UserError(f"cannot quantise {name}: it holds weights that are not finite; load the model anew")
    nbytes = section_bytes(hidden, bits)
    for number, (name, part) in enumerate(parts.items()):
        for first in range(0, neurons, AT_ONCE):
            some = records[first : first + AT_ONCE, number * nbytes : (number + 1) * nbytes]
            _fill(some, part[first : first + AT_ONCE].detach().cpu().float(), bits, grid or half_quadratic)
            if not some[:, :HEAD_BYTES].contiguous().view(torch.float16).isfinite().all():
                raise UserError(f"cannot quantise {name}: a group's scale or zero point lies beyond fp16; keep 16 bits")
    return records


def decode(
    records: UInt8[Tensor, "neurons stride"], hidden: int, bits: int = 4
) -> tuple[Float32[Tensor, "neurons hidden"], Float32[Tensor, "neurons hidden"], Float32[Tensor, "neurons hidden"]]:
    """The weights: gate, up and down, the last one transposed.

    Raises `UserError` for bits or a `hidden` that `encode` refuses, and for rows of another length.
    """
    stride = record_bytes(hidden, bits)
    if records.dtype != torch.uint8 or records.ndim != 2 or records.shape[1] != stride:
        raise UserError(f"records are {records.dtype} {list(records.shape)}; expected torch.uint8 [neurons, {stride}]")
    nbytes = section_bytes(hidden, bits)
    gate, up, down = (_weights(records[:, at * nbytes : (at + 1) * nbytes], hidden, bits) for at in range(SECTIONS))
    return gate, up, down


def half_quadratic(weight: Float32[Tensor, "rows hidden"], bits: int) -> tuple[Tensor, Tensor]:
    """The scale and zero point of each group, [rows, groups], by the steps of the package `hqq`."""
    with extra("lab"):
        from hqq.core.quantize import Quantizer

    rows, hidden = weight.shape
    _, chosen = Quantizer.quantize(weight, bits, group_size=group_of(bits), axis=1, bitpack=False, device="cpu")
    scale, zero = (chosen[name].float().view(rows, groups(hidden, bits)) for name in ("scale", "zero"))
    return _widened(weight.reshape(rows, groups(hidden, bits), group_of(bits)), scale, zero)


def min_max(weight: Float32[Tensor, "rows hidden"], bits: int) -> tuple[Tensor, Tensor]:
    """The scale and zero point of each group, [rows, groups], that its least and greatest weight give."""
    low, high = weight.reshape(len(weight), -1, group_of(bits)).aminmax(dim=2)
    scale = (high - low).clamp(min=NARROW) / (2**bits - 1)
    return scale, -low / scale


def _fill(section: UInt8[Tensor, "rows bytes"], weight: Float32[Tensor, "rows hidden"], bits: int, grid: Grid) -> None:
    """Write one section of each record."""
    rows, hidden = weight.shape
    of_groups = weight.reshape(rows, groups(hidden, bits), group_of(bits))
    scale, zero = grid(weight, bits)
    count, heads = groups(hidden, bits), []
    for number, values in enumerate((scale, zero)):
        head, codes = _in_bytes(values)
        heads += head
        start = HEAD_BYTES + number * count
        section[:, start : start + count] = codes
    section[:, :HEAD_BYTES] = torch.stack(heads, 1).view(torch.uint8)
    scale, zero = (part[:, :, None] for part in _groups_of(section, hidden, bits))
    codes = (of_groups / scale + zero).round_().clamp_(0, 2**bits - 1).to(torch.int32)
    section[:, codes_start(hidden, bits) :] = _packed(codes.view(rows, hidden), bits)


def _widened(of_groups: Tensor, scale: Tensor, zero: Tensor) -> tuple[Tensor, Tensor]:
    """Give groups of nearly equal weights, whose scale is 1, the least scale of the row's other groups."""
    narrow = of_groups.amax(2) - of_groups.amin(2) <= NARROW
    least = torch.where(narrow, torch.inf, scale).amin(1, keepdim=True)
    least = torch.where(least.isfinite(), least, NARROW)
    return torch.where(narrow, least, scale), torch.where(narrow, -of_groups.mean(2) / least, zero)


def _in_bytes(values: Tensor) -> tuple[list[Tensor], Tensor]:
    """fp16 step and offset of each row, then a byte for each value. The steps reach the greatest value."""
    low = values.amin(1).half()
    spread = (values.amax(1) - low.float()).clamp(min=0)
    step = (spread / STEPS).half()
    step = torch.where(step.float() * STEPS < spread, torch.nextafter(step, torch.tensor(torch.inf).half()), step)
    steps = (values - low.float()[:, None]) / torch.where(step > 0, step, 1).float()[:, None]
    return [step, low], steps.round_().clamp_(0, STEPS).to(torch.uint8)


def _groups_of(section: UInt8[Tensor, "rows bytes"], hidden: int, bits: int) -> list[Float32[Tensor, "rows groups"]]:
    """Scales and zero points."""
    head, count = section[:, :HEAD_BYTES].contiguous().view(torch.float16).float(), groups(hidden, bits)
    given = section[:, HEAD_BYTES : HEAD_BYTES + 2 * count].float().split(count, dim=1)
    return [values * head[:, 2 * at, None] + head[:, 2 * at + 1, None] for at, values in enumerate(given)]


def _packed(codes: Tensor, bits: int) -> UInt8[Tensor, "rows bytes"]:
    """Four codes in each number, sixteen numbers in each block."""
    rows, hidden = codes.shape
    shifts = bits * torch.arange(FIELDS, dtype=torch.int32)[:, None]
    numbers = (codes.view(rows, hidden // BLOCK, FIELDS, LANES) << shifts).sum(2)
    shifts = 8 * torch.arange(FIELDS * bits // 8)
    return (numbers[..., None] >> shifts & 255).to(torch.uint8).view(rows, hidden * bits // 8)


def _weights(section: UInt8[Tensor, "rows bytes"], hidden: int, bits: int) -> Float32[Tensor, "rows hidden"]:
    """Scale · (code − zero)."""
    rows = len(section)
    scale, zero = (part[:, :, None] for part in _groups_of(section, hidden, bits))
    numbers = section[:, codes_start(hidden, bits) :].int().reshape(rows, hidden // BLOCK, LANES, FIELDS * bits // 8)
    numbers = (numbers << 8 * torch.arange(FIELDS * bits // 8, dtype=torch.int32)).sum(3)[:, :, None]
    codes = numbers >> bits * torch.arange(FIELDS, dtype=torch.int32)[:, None] & 2**bits - 1
    return (scale * (codes.reshape(rows, groups(hidden, bits), group_of(bits)) - zero)).view(rows, hidden)

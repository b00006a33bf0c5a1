"""SpQR's quantiser: it chooses outliers, each row's scale and zero point in a group, and the codes.

Matrices are transposed here: a column's weights lie side by side. The rows of some tiles, `LANES`, are taken at once,
so that LLVM vectorises the loops over them; it would unroll shorter ones. Matrices are padded to whole such strips. No
strip needs another one, so strips are shared out to threads.
"""

import numba
import numpy as np
import torch
from jaxtyping import Bool, Float, Float16, UInt8
from torch import Tensor

from toolkit.kernels.engine.compiled import compiled
from toolkit.kernels.engine.elements import float16_bits
from toolkit.kernels.engine.parallel import over_rows
from toolkit.kernels.spqr.shared import LEVELS, TILE, dequantise, round_to_float16

LARGEST = LEVELS - 1
PAIRS = LEVELS * LEVELS
LANES = 4 * TILE
MOST_STEPS = 1024  # a statistic this many of its steps from zero loses less by one value for the tile than by fp16


def leave_one_out_gains(
    weight: Float[Tensor, "columns padded"], diagonal: Float[Tensor, " columns"], group: int = TILE
) -> Float[Tensor, "columns padded"]:
    """The fall of a group's squared error when this weight is an outlier and the others are rounded without it.

    Errors are over `diagonal`, that of the Hessian's inverse factor, as GPTQ weighs them; scales and zero points are
    not quantised here. A group has the weights of `group` columns, the last one those that are left.
    """
    gains = torch.empty_like(weight)
    matrices = weight.numpy(), diagonal.contiguous().numpy(), group, gains.numpy()
    over_rows(_gains, weight.shape[1] // LANES, weight.nbytes * group, *matrices)
    return gains


def quantise(
    wanted: Float[Tensor, "columns padded"],
    inverse: Float[Tensor, "columns columns"] | Float[Tensor, "0 0"],
    diagonal: Float[Tensor, " columns"],
    rows: int,
    threshold: float,
    search: bool,
    group: int,
    codes: UInt8[Tensor, "columns padded"],
    scales: UInt8[Tensor, "groups padded"],
    zeros: UInt8[Tensor, "groups padded"],
    second_order: Float16[Tensor, "groups tall 4"],
    outlier: Bool[Tensor, "columns padded"],
    added: Float[Tensor, "columns padded"],
) -> None:
    """Quantise the columns `wanted` in order, and overwrite them with the quantised values.

    A column's error reaches those behind it by the `inverse`, the U of `toolkit.sparsity.hessian`; none does if that is
    empty. Weights whose gain is above the `threshold` are outliers. With `search`, a row takes the pair of scale and
    zero point that gives the least error of all 64. A row has a scale and a zero point for `group` columns, and 16 rows
    have second-order statistics for them. The other tensors are filled in: codes, the second-order statistics
    in the order of `toolkit.kernels.spqr.layout`, the outliers and the fp16 numbers that they add to their codes. All
    are contiguous, and those of no other type are of the type of `wanted`.
    """
    matrices = (array.numpy() for array in (wanted, inverse, diagonal))
    filled = (codes, scales, zeros, second_order.view(torch.uint16), outlier, added)
    arguments = (*matrices, rows, threshold, search, group, *(array.numpy() for array in filled))
    over_rows(_quantise, wanted.shape[1] // LANES, wanted.nbytes * PAIRS, *arguments)


@numba.njit(inline="always")
def code_of(value, scale, zero):
    """The code nearest to a value, as a number of its type; 0 for a NaN and where the scale is 0."""
    kind = type(value)
    step = np.rint(value / scale + zero)
    return min(step, kind(LARGEST)) if scale != 0 and step > 0 else kind(0)


@numba.njit(inline="always")
def room(shape, like):
    """Two arrays of the type of another one. Numba does not know that the parts of a larger array are contiguous."""
    return np.empty(shape, like.dtype), np.empty(shape, like.dtype)


@compiled
def group_gains(weight, diagonal, gains):
    """`leave_one_out_gains` of a group in one strip."""
    kind = weight.dtype.type
    (low, high), (scale, zero), (whole, errors) = room(LANES, weight), room(LANES, weight), room(LANES, weight)
    for left in range(-1, len(weight)):  # -1: all are rounded
        low[:], high[:] = 0, 0
        for column in range(len(weight)):
            if column != left:
                for lane in range(LANES):
                    low[lane] = min(low[lane], weight[column, lane])
                    high[lane] = max(high[lane], weight[column, lane])
        first_order(low, high, scale, zero)
        errors[:] = 0
        for column in range(len(weight)):
            for lane in range(LANES):
                value = weight[column, lane] if column != left else kind(0)
                code = min(max(np.rint(value / scale[lane] + zero[lane]), kind(0)), kind(LARGEST))
                error = ((code - zero[lane]) * scale[lane] - value) / diagonal[column]
                errors[lane] += error * error
        for lane in range(LANES):
            if left < 0:
                whole[lane] = errors[lane]
            else:
                gains[left, lane] = whole[lane] - errors[lane]


@compiled
def first_order(low, high, scale, zero):
    """Scale and zero point, so that code 0 stands for `low` and code 7 for `high`; 1 and 0 for a group of zeros."""
    kind = low.dtype.type
    for lane in range(len(low)):
        step = (high[lane] - low[lane]) / kind(LARGEST)
        scale[lane] = step if step > 0 else kind(1)
        zero[lane] = -low[lane] / scale[lane]


@compiled
def second_order(statistics, codes):
    """Codes of a tile's scales or zero points, and the scale and zero point of these codes, fp16."""
    kind = statistics.dtype.type
    low, high = statistics.min(), statistics.max()
    step = (high - low) / kind(LARGEST)
    alike = abs(low) >= MOST_STEPS * step  # then code 1 stands for all of them
    scale = round_to_float16(np.float32((low + high) / 2 if alike else step))
    zero = round_to_float16(np.float32(0 if alike or scale == 0 else -low / scale))
    for lane in range(len(statistics)):
        codes[lane] = 1 if alike else np.uint8(code_of(statistics[lane], kind(scale), kind(zero)))
    return scale, zero


@compiled
def best_pairs(weight, importance, scales, zeros, pairs):
    """For each row of a strip the pair of codes that gives a group the least sum of importance times squared error.

    `scales` and `zeros` [8, rows] are what the codes stand for. Scales below zero and above fp16's range are left out,
    and the first pair wins ties. A pair is 8 times the scale's code and the zero point's.
    """
    kind = weight.dtype.type
    steps = np.empty(weight.shape, weight.dtype)
    errors, least = np.empty(LANES, weight.dtype), np.empty(LANES, weight.dtype)
    least[:], pairs[:] = np.inf, 0
    for pair in range(PAIRS):
        scale, zero = scales[pair // LEVELS], zeros[pair % LEVELS]
        if pair % LEVELS == 0:
            for column in range(len(weight)):
                for lane in range(LANES):
                    steps[column, lane] = weight[column, lane] / (scale[lane] if scale[lane] != 0 else kind(1))
        errors[:] = 0
        for column in range(len(weight)):
            for lane in range(LANES):
                code = min(max(np.rint(steps[column, lane] + zero[lane]), kind(0)), kind(LARGEST))
                error = (code - zero[lane]) * scale[lane] - weight[column, lane]
                errors[lane] += error * error * importance[column, lane]
        for lane in range(LANES):  # a comparison with NaN is false
            if errors[lane] < least[lane] and scale[lane] >= 0:
                least[lane], pairs[lane] = errors[lane], pair


@compiled
def put_strip(columns, matrix, strip, first):
    """Copy contiguous columns to a strip of a matrix, from its column `first` on."""
    for column in range(min(len(columns), len(matrix) - first)):
        matrix[first + column, strip * LANES : (strip + 1) * LANES] = columns[column]


@compiled
def _gains(weight, diagonal, width, gains, first, last):
    part, gain = room((len(weight), LANES), weight)
    for strip in range(first, last):
        part[:] = weight[:, strip * LANES : (strip + 1) * LANES]
        for start in range(0, len(part), width):
            group = slice(start, start + width)
            group_gains(part[group], diagonal[group], gain[group])
        put_strip(gain, gains, strip, 0)


@compiled
def _quantise(
    wanted,
    inverse,
    diagonal,
    rows,
    threshold,
    search,
    width,
    codes,
    scales,
    zeros,
    statistics,
    outlier,
    added,
    first,
    last,
):
    kind = wanted.dtype.type
    columns, pairs = np.empty((len(wanted), LANES), wanted.dtype), np.empty(LANES, np.uint8)
    (low, high), (scale, zero), (scale_codes, zero_codes) = room(LANES, wanted), room(LANES, wanted), room(LANES, codes)
    scale_codes[:], zero_codes[:] = 0, 0
    scale_values, zero_values = room((LEVELS, LANES), wanted)
    (gains, importance), (errors, extra) = room((width, LANES), wanted), room((width, LANES), wanted)
    nearest, outside = np.empty((width, LANES), np.uint8), np.empty((width, LANES), np.bool_)
    for strip in range(first, last):
        columns[:] = wanted[:, strip * LANES : (strip + 1) * LANES]
        for start in range(0, len(columns), width):
            group, number = slice(start, start + width), start // width
            part = columns[group]
            group_gains(part, diagonal[group], gains)
            low[:], high[:] = 0, 0
            for column in range(len(part)):
                weighs = kind(1) / (diagonal[start + column] * diagonal[start + column])
                for lane in range(LANES):
                    left_out = gains[column, lane] > kind(threshold)
                    value = kind(0) if left_out else part[column, lane]
                    low[lane], high[lane] = min(low[lane], value), max(high[lane], value)
                    importance[column, lane] = kind(0) if left_out else weighs
                    outside[column, lane] = left_out
            first_order(low, high, scale, zero)
            for first_lane in range(0, LANES, TILE):
                tile = strip * (LANES // TILE) + first_lane // TILE
                filled = slice(first_lane, min(first_lane + TILE, rows - strip * LANES))
                if filled.start < filled.stop:
                    within = slice(first_lane, first_lane + TILE)
                    scale_step, scale_zero = second_order(scale[filled], scale_codes[filled])
                    zero_step, zero_zero = second_order(zero[filled], zero_codes[filled])
                    for code in range(LEVELS):
                        scale_values[code, within] = dequantise(code, scale_step, scale_zero)
                        zero_values[code, within] = dequantise(code, zero_step, zero_zero)
                    for place, statistic in enumerate((scale_step, zero_step, scale_zero, zero_zero)):
                        statistics[number, tile, place] = float16_bits(statistic)
            if search:
                best_pairs(part, importance, scale_values, zero_values, pairs)
                scale_codes[:], zero_codes[:] = pairs // LEVELS, pairs % LEVELS
            for lane in range(LANES):
                scale[lane] = scale_values[scale_codes[lane], lane]
                zero[lane] = zero_values[zero_codes[lane], lane]
            for column in range(len(part)):
                for lane in range(LANES):
                    code = code_of(part[column, lane], scale[lane], zero[lane])
                    value = kind(dequantise(code, np.float32(scale[lane]), np.float32(zero[lane])))
                    more = kind(round_to_float16(np.float32(part[column, lane] - value)))
                    more = more if outside[column, lane] else kind(0)
                    errors[column, lane] = (part[column, lane] - (value + more)) / diagonal[start + column]
                    nearest[column, lane], extra[column, lane] = np.uint8(code), more
                    part[column, lane] = value + more
                _spread(column, inverse[group], errors, start + column + 1, start + width, columns)
            for column in range(len(part)):
                _spread(column, inverse[group], errors, start + width, len(columns), columns)
            within = slice(strip * LANES, (strip + 1) * LANES)
            scales[number, within], zeros[number, within] = scale_codes, zero_codes
            put_strip(nearest, codes, strip, start)
            put_strip(outside, outlier, strip, start)
            put_strip(extra, added, strip, start)
        put_strip(columns, wanted, strip, 0)


@compiled
def _spread(column, inverse, errors, first, last, columns):
    """Take the errors of a column from those behind it, from `first` on."""
    for later in range(first, min(last, inverse.shape[1])):
        ratio = inverse[column, later]
        for lane in range(LANES):
            columns[later, lane] -= ratio * errors[column, lane]

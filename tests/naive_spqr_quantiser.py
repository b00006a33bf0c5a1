"""Slow, obvious SpQR: NumPy, one weight after the other, and the inverse Hessian shrinks by a column a step (OBQ)."""

import math

import numpy as np

TILE = 16


def half(value):
    """Rounded to fp16 by way of fp32, as torch does it."""
    return np.float16(np.float32(value))


def level(value):
    """The nearest of the eight codes, of two the even one. Python's own numbers are ten times as fast as NumPy's."""
    return round(min(max(value, 0.0), 7.0))


def nearest(value, scale, zero):
    """The code whose value is nearest."""
    return 0 if scale == 0 else level(value / float(scale) + float(zero))


def value_of(code, scale, zero):
    """scale · (code − zero) in fp16 steps."""
    return half(half(half(code) - zero) * scale)


def grid(weights):
    """Scale and zero point of a few weights."""
    low, high = min(0.0, *weights), max(0.0, *weights)
    return ((high - low) / 7, -low / ((high - low) / 7)) if high > low else (1.0, 0.0)


def error(weights, diagonal):
    """The squared error of plain rounding, each weight's over its entry of the factor's diagonal."""
    scale, zero = grid(weights)
    rounded = [(level(w / scale + zero) - zero) * scale for w in weights]
    return sum(((r - w) / d) ** 2 for r, w, d in zip(rounded, weights, diagonal, strict=True))


def gains(weights, diagonal):
    """The fall of a group's error if a weight is put at zero, for each of its weights."""
    whole = error(weights, diagonal)
    return [whole - error([0.0 if k == i else w for k, w in enumerate(weights)], diagonal) for i in range(len(weights))]


def shared(values):
    """Codes of the values, and the tile's scale and zero point for them."""
    low, high = min(values), max(values)
    step = (high - low) / 7
    if abs(low) >= 1024 * step:
        return [1] * len(values), half((low + high) / 2), half(0)
    step = half(step)
    zero = half(-low / float(step))
    return [nearest(v, step, zero) for v in values], step, zero


def best_pair(weights, diagonal, is_outlier, scales, zeros):
    """The values of scale and zero point, of eight each, that give the least weighted squared error of what is kept."""
    best, chosen = math.inf, None
    for scale in scales:
        for zero in zeros:
            lost, step, offset = 0.0, float(scale), float(zero)
            for weight, entry, out in zip(weights, diagonal, is_outlier, strict=True):
                code = level(weight / (step or 1) + offset)
                lost += 0 if out else (((code - offset) * step - weight) / entry) ** 2
            if scale >= 0 and lost < best:
                best, chosen = lost, (scale, zero)
    return chosen


def quantise(weight, gram, share, damping, search, size=TILE):
    """The dense weight that is left, how many are outliers, and the weights' codes; for float64 arrays."""
    weight = weight.copy()
    rows, columns = weight.shape
    inverse = np.linalg.inv(gram + damping * np.diag(gram).mean() * np.eye(columns))
    diagonal = np.diag(np.linalg.cholesky(inverse).T).tolist()
    groups = [range(start, min(start + size, columns)) for start in range(0, columns, size)]
    factors = {group: diagonal[group.start : group.stop] for group in groups}
    at_start = [g for group in groups for row in weight for g in gains(row[group].tolist(), factors[group])]
    kept, in_order = len(at_start) - round(share * len(at_start)), [-math.inf, *sorted(at_start), math.inf]
    threshold = (in_order[kept] + in_order[kept + 1]) / 2
    result, codes, outliers = np.zeros_like(weight), np.zeros(weight.shape, int), 0
    for group in groups:
        is_outlier = [[gain > threshold for gain in gains(row[group].tolist(), factors[group])] for row in weight]
        grids = [
            grid([0.0 if out else w for w, out in zip(row[group].tolist(), mask, strict=True)])
            for row, mask in zip(weight, is_outlier, strict=True)
        ]
        scale, zero, every = [], [], ([], [])
        for tile in range(0, rows, TILE):
            for kind, found in ((0, scale), (1, zero)):
                chosen, step, offset = shared([statistics[kind] for statistics in grids[tile : tile + TILE]])
                found += [value_of(code, step, offset) for code in chosen]
                every[kind].extend([[value_of(code, step, offset) for code in range(8)]] * len(chosen))
        if search:
            parts = (weight[:, group].tolist(), [factors[group]] * rows, is_outlier, *every)
            scale, zero = zip(*[best_pair(*of_row) for of_row in zip(*parts, strict=True)], strict=True)
        for column in group:
            for row in range(rows):
                codes[row, column] = nearest(weight[row, column], scale[row], zero[row])
                value = value_of(codes[row, column], scale[row], zero[row])
                added = half(weight[row, column] - float(value)) if is_outlier[row][column - group[0]] else half(0)
                outliers += int(is_outlier[row][column - group[0]])
                result[row, column] = float(value) + float(added)
                lost = weight[row, column] - result[row, column]
                weight[row, column + 1 :] -= lost * inverse[column, column + 1 :] / inverse[column, column]
            inverse = inverse - np.outer(inverse[:, column], inverse[column]) / inverse[column, column]
    return result, outliers, codes

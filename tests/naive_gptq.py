"""Slow, obvious RTN and GPTQ: NumPy, one weight after the other; the inverse Hessian loses a column a step (OBQ)."""

import numpy as np

from tests.naive_spqr_quantiser import half


def grid(weights, bits):
    """Scale and zero point of a few weights, in fp16."""
    low, high = min(0.0, *weights), max(0.0, *weights)
    scale = half((high - low) / (2**bits - 1)) or np.float16(1)
    return scale, half(-low / float(scale))


def nearest(value, scale, zero, bits):
    """The code whose value is nearest."""
    return int(min(max(np.round(value / float(scale) + float(zero)), 0), 2**bits - 1))


def round_to_nearest(weight, bits, group):
    """Codes, and what they stand for."""
    return gptq(weight, np.eye(weight.shape[1]), bits, group, 0)


def gptq(weight, gram, bits, group, damping):
    """The same; the columns behind take up each error."""
    weight = weight.copy()
    rows, columns = weight.shape
    inverse = np.linalg.inv(gram + damping * np.diag(gram).mean() * np.eye(columns))
    codes, result = np.zeros(weight.shape, int), np.zeros(weight.shape)
    for column in range(columns):
        if column % group == 0:
            grids = [grid(list(row), bits) for row in weight[:, column : column + group]]
        for row in range(rows):
            scale, zero = grids[row]
            codes[row, column] = nearest(weight[row, column], scale, zero, bits)
            result[row, column] = (codes[row, column] - float(zero)) * float(scale)
            lost = weight[row, column] - result[row, column]
            weight[row, column + 1 :] -= lost * inverse[column, column + 1 :] / inverse[column, column]
        inverse = inverse - np.outer(inverse[:, column], inverse[column]) / inverse[column, column]
    return codes, result

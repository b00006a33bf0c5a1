"""The int8 product for CPUs with SIMD: weights are sign-extended, converted to fp32 and multiplied."""

import torch

from toolkit.kernels.common.compiled import compiled
from toolkit.kernels.common.products import ROWS, multiply_rows

multiply = multiply_rows(torch.int8)


@compiled
def matvec(weight, x, y, first, last):
    """Set `y[vector, row] = Σ weight[row, column] · x[vector, column]`, summed in fp32, for rows `first` to `last`."""
    whole = first + (last - first) // ROWS * ROWS
    for row in range(first, whole, ROWS):
        multiply(weight, row, ROWS, x, y, row)
    for row in range(whole, last):
        multiply(weight, row, 1, x, y, row)

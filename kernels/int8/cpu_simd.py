"""The int8 product for CPUs with SIMD: weights are sign-extended, converted to fp32 and multiplied."""

import numba
import torch

from toolkit.kernels.common.products import ROWS, multiply_rows
from toolkit.kernels.common.threads import COMPILE

multiply = multiply_rows(torch.int8)


@numba.njit(**COMPILE)
def matvec(weight, x, y, first, last):
    """Set `y[vector, row] = Σ weight[row, column] · x[vector, column]`, summed in fp32, for rows `first` to `last`."""
    whole = first + (last - first) // ROWS * ROWS
    for row in range(first, whole, ROWS):
        multiply(weight, row, ROWS, x, y, row)
    for row in range(whole, last):
        multiply(weight, row, 1, x, y, row)

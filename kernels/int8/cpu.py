"""The int8 product for any CPU: a plain loop, which LLVM vectorises for the CPU at hand."""

import numba

from toolkit.kernels.runtime.compiled import compiled


@compiled(fastmath={"reassoc", "nsz", "contract"})
def matvec(weight, x, y, first, last):
    """Set `y[vector, row] = Σ weight[row, column] · x[vector, column]`, summed in fp32, for rows `first` to `last`."""
    for row in range(first, last):
        for vector in range(len(x)):
            total = numba.float32(0)
            for column in range(x.shape[1]):
                total += numba.float32(weight[row, column]) * x[vector, column]
            y[vector, row] = total


@compiled
def scale_rows(y, scales):
    """Multiply each of `y` with its scale, in place."""
    for row in range(y.size):
        y[row] *= scales[row]

"""Outliers on CUDA GPUs: the product by itself, and how other kernels walk along a row's outliers.

A warp takes a block of sixteen rows. Lanes r and r + 16 share row r and take its words in turn. In PTCSR they read 32
neighbouring words, 128 bytes, at once (thesis, section 3.4.3). In CSR each pair of lanes follows a row of its own.
"""

from functools import cache

import torch
from numba import cuda, float32, int64, uint16, uint64
from torch import Tensor

from toolkit.kernels.csr.layout import Outliers, column_bits
from toolkit.kernels.csr.shared import BLOCK, column, span
from toolkit.kernels.engine.gpu import LANES, SIMULATED, TO_FLOAT32, Launch, as_unsigned, exchange, run

WARPS = 4  # of a thread block
VECTORS = 16  # that one pass over the outliers multiplies, at most
FLOATS = (torch.float32, torch.float16, torch.bfloat16)  # types of activations that kernels read as they are

_from_float16 = TO_FLOAT32[torch.float16]


@cuda.jit(device=True, inline="always")
def value(word, bits):
    """The fp16 number above the column, as fp32, by the GPU's own conversion."""
    return _from_float16(uint16(uint64(word) >> uint64(bits)))


@cache
def lane_words(storage: str):
    """The function that gives a lane's words of a row: the first, the end, and the stride.

    `parts` lanes share the row's words; `part` is the number of this lane among them.
    """
    where = span(storage)
    if SIMULATED:
        where = where.py_func  # compiled functions do not take the simulator's arrays

    @cuda.jit(device=True, inline="always")
    def lane_words(offsets, count, block, row, rows, part, parts):
        first, end, step = int64(0), int64(0), int64(1)
        if int64(block) * int64(BLOCK) + int64(row) < rows:
            first, end, step = where(offsets, int64(block), int64(row), count)
        return first + int64(part) * int64(step), end, int64(parts) * int64(step)

    return lane_words


def add_matvec(outliers: Outliers, x: Tensor, out: Tensor) -> None:
    """Add the product with `x` [batch, columns] to `out` [batch, rows]. The caller has checked the arguments."""
    rows, columns = outliers.shape
    if outliers.col_vals.numel() == 0 or columns == 0 or out.numel() == 0:
        return
    x = readable(x)
    launch = Launch((-(-rows // (BLOCK * WARPS)), 1), (LANES, WARPS, 1))
    for some, result in zip(x.split(VECTORS), out.split(VECTORS), strict=True):
        kernel = add_matvec_kernel(outliers.name, column_bits(columns), x.dtype, len(some))
        run(kernel, launch, out.device, outliers.offsets, as_unsigned(outliers.col_vals), as_unsigned(some), result)


@cache
def add_matvec_kernel(storage: str, bits: int, x_dtype: torch.dtype, batch: int):
    """The kernel that adds `Σ value · x[vector, column]` over each row's outliers to `y[vector, row]`."""
    words_of_lane, to_float32 = lane_words(storage), TO_FLOAT32[x_dtype]

    @cuda.jit
    def add_outliers(offsets, words, x, y):
        total = cuda.local.array(batch, float32)
        for b in range(batch):
            total[b] = float32(0)
        block = int64(cuda.blockIdx.x * cuda.blockDim.y + cuda.threadIdx.y)
        row, part = cuda.threadIdx.x % BLOCK, cuda.threadIdx.x // BLOCK
        at, end, step = words_of_lane(offsets, words.size, block, row, y.shape[1], part, LANES // BLOCK)
        while at < end:
            word = words[at]
            place, weight = column(word, bits), value(word, bits)
            if place < x.shape[1]:
                for b in range(batch):
                    total[b] += weight * to_float32(x[b, place])
            at += step
        for b in range(batch):
            whole = total[b] + exchange(total[b], BLOCK)
            if part == 0 and block * BLOCK + row < y.shape[1]:
                y[b, block * BLOCK + row] += whole

    return add_outliers


def readable(x: Tensor) -> Tensor:
    """`x` in a type that the kernels read: as it is, or else in fp32."""
    return x if x.dtype in FLOATS else x.to(torch.float32)

"""Sparse outliers in fp16, as CSR or PTCSR (thesis, section 3.4): packed, and multiplied with vectors.

`encode(storage, ...)` packs; `add_matvec` adds the product to what is there. The fused products of other families
call the same functions of blocks. `backend="auto"` takes the CUDA kernel where the tensors are on a GPU, and otherwise
the first of `BACKENDS` that this CPU can run.
"""

from collections.abc import Callable
from functools import cache

import numpy as np
import torch
from jaxtyping import Float, Float16, Float32, Int64
from torch import Tensor

from toolkit.errors import unknown
from toolkit.kernels.csr import cpu, cpu_simd
from toolkit.kernels.csr.layout import STORAGES, CsrOutliers, Outliers, column_bits, no_outliers
from toolkit.kernels.csr.shared import BLOCK
from toolkit.kernels.engine.backends import AVX2, CUDA, Backend, Backends
from toolkit.kernels.engine.compiled import compiled
from toolkit.kernels.engine.parallel import over_rows
from toolkit.kernels.engine.tensors import operands

__all__ = ["BACKENDS", "STORAGES", "CsrOutliers", "Outliers", "add_matvec", "encode", "no_outliers"]


BACKENDS = Backends({"avx2": Backend(AVX2, cpu_simd.add_product), "portable": Backend(frozenset(), cpu.add_product)})


def encode(
    storage: str,
    shape: tuple[int, int],
    rows: Int64[Tensor, " count"],
    columns: Int64[Tensor, " count"],
    values: Float16[Tensor, " count"],
) -> Outliers:
    """Pack outliers as "csr" or "ptcsr". Raises `UserError` for another name, and what `Outliers.encode` raises."""
    if storage not in STORAGES:
        raise unknown("storage of outliers", storage, STORAGES)
    return STORAGES[storage].encode(shape, rows, columns, values)


def add_matvec(
    outliers: Outliers, x: Float[Tensor, "*batch columns"], out: Float32[Tensor, "*batch rows"], backend: str = "auto"
) -> Float32[Tensor, "*batch rows"]:
    """Add the product with `x`, [columns] or [batch, columns], taken as fp32 and finite, to `out`, and return it.

    Raises `UserError` for a backend that is unknown, that this machine cannot run or that works on another device, and
    `ValueError` for an `x` or `out` of the wrong shape, type or device.
    """
    (rows, columns), device = outliers.shape, outliers.offsets.device
    kernels = BACKENDS.choose(backend, device)
    with operands(x, out, outliers.shape, device) as (each_x, each_out, result):
        if kernels == CUDA:
            from toolkit.kernels.csr import cuda

            cuda.add_matvec(outliers, each_x, each_out)
        else:
            run = _rows(kernels.product, outliers.name, column_bits(columns))
            given = each_x.to(torch.float32).numpy(), each_out.numpy()
            over_rows(run, -(-rows // BLOCK), outliers.col_vals.nbytes, *outliers.arrays, *given)
    return result


@cache
def _rows(add_product: Callable, storage: str, bits: int):
    add = add_product(storage, bits)

    @compiled
    def of_blocks(offsets, words, x, y, first, last):
        sums = np.empty(BLOCK, np.float32)
        for block in range(first, last):
            rows = min(BLOCK, y.shape[1] - BLOCK * block)
            for vector in range(len(x)):
                sums[:] = 0
                add(offsets, words, block, rows, x, vector, sums)
                for row in range(rows):
                    y[vector, BLOCK * block + row] += sums[row]

    return of_blocks

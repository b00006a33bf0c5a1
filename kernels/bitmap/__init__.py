"""Bitmap-packed matrices: one bit per element and the non-zero values (ENDOR, section 4.1).

One door per operation: `encode`, `decompress`, `matvec`. `backend="auto"` takes the CUDA kernels if that is where the
tensors are, else the first of `BACKENDS` that this CPU can run.

    [[1, 0, 0, 2],      bitmap       0b1001, 0b0000, 0b0010   (lowest bit = first column; rows padded to 32 bits)
     [0, 0, 0, 0],      row_offsets  0, 2, 2, 3
     [0, 3, 0, 0]]      values       1, 2, 3

`block_offsets` holds, for each row, the number of its values before column 0, 4096, 8192 ...: here 0, 0, 0.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from jaxtyping import Float32
from torch import Tensor

from toolkit.kernels.bitmap import cpu as portable
from toolkit.kernels.bitmap import cpu_simd
from toolkit.kernels.bitmap.layout import Bitmap, block_count, row_bytes
from toolkit.kernels.bitmap.shared import BLOCK, WORD
from toolkit.kernels.engine.backends import AVX2, CUDA, Backend, Backends
from toolkit.kernels.engine.parallel import Product, Task, over_rows
from toolkit.kernels.engine.simd import CACHE_LINE
from toolkit.kernels.engine.tensors import BITS, expect, operands

__all__ = ["BACKENDS", "BLOCK", "WORD", "Bitmap", "columns", "decompress", "encode", "matvec", "row_bytes"]

# the bits that make an element non-zero: for floats all but the sign, so that −0.0 counts as zero
SIGNIFICANT = {torch.float32: 0x7FFFFFFF, torch.float16: 0x7FFF, torch.bfloat16: 0x7FFF, torch.int8: 0xFF}
STREAM_BYTES = 8 << 20


@dataclass(frozen=True)
class BitmapBackend(Backend):
    """A backend that decodes, too. `product` takes a type and gives the compiled function of rows, for one vector."""

    decompress: Callable  # streaming -> compiled function of rows
    decode_and_multiply: Callable | None = None  # as `product`, for several vectors; None: one after the other


def _simd(expand, features: frozenset[str]) -> BitmapBackend:
    operations = (cpu_simd.matvec, cpu_simd.decompress, cpu_simd.decode_and_multiply)
    return BitmapBackend(features, *(partial(operation, expand) for operation in operations))


BACKENDS = Backends(
    {
        "avx512": _simd(cpu_simd.by_instruction, frozenset({"avx512f", "avx512bw", "avx512vl", "avx512vbmi2"})),
        "avx2": _simd(cpu_simd.by_shuffle, AVX2),
        "portable": BitmapBackend(frozenset(), portable.matvec, lambda streaming: portable.decompress),
    }
)


def encode(weight: Tensor) -> Bitmap:
    """Pack a matrix [rows, columns] of float32, float16, bfloat16 or int8.

    Exact to the bit, but for −0.0, which counts as zero and decodes as +0.0. NaN and infinities are non-zeros.
    """
    rows, columns = weight.shape
    dense = _bits(weight)
    bitmap = torch.empty(rows, row_bytes(columns), dtype=torch.uint8)
    words = bitmap.numpy().view(np.uint32)
    row_offsets = torch.zeros(rows + 1, dtype=torch.int64)
    block_offsets = torch.empty(rows, block_count(columns), dtype=torch.int32)
    significant = dense.dtype.type(SIGNIFICANT[weight.dtype])
    marked = (words, row_offsets[1:].numpy(), block_offsets.numpy())
    over_rows(portable.mark, rows, dense.nbytes, dense, significant, *marked)
    torch.cumsum(row_offsets, 0, out=row_offsets)
    values = torch.empty(int(row_offsets[-1]), dtype=weight.dtype)
    over_rows(portable.gather, rows, dense.nbytes, dense, words, row_offsets.numpy(), _bits(values))
    return Bitmap((rows, columns), bitmap, row_offsets, block_offsets, values)


def columns(encoded: Bitmap, dtype: torch.dtype) -> Tensor:
    """The column of every value, as `dtype` (an integer type that holds them), in row-major order."""
    words, row_offsets, values = encoded.arrays
    found = torch.empty(encoded.values.numel(), dtype=dtype)
    over_rows(portable.positions, encoded.shape[0], values.nbytes, words, row_offsets, found.numpy())
    return found


def decompress(encoded: Bitmap, out: Tensor | None = None, backend: str = "auto") -> Tensor:
    """The dense matrix [rows, columns], in `out` if given, on the device of the packed one.

    Raises `UserError` for a backend that is unknown, that this machine cannot run or that works on another device than
    the tensors', and `ValueError` for an `out` of the wrong shape, type or device.
    """
    kernels = BACKENDS.choose(backend, encoded.device)
    if out is None:
        out = torch.empty(encoded.shape, dtype=encoded.dtype, device=encoded.device)
    expect("out", out, encoded.dtype, encoded.shape, encoded.device)
    if kernels == CUDA:
        from toolkit.kernels.bitmap import cuda

        cuda.decompress(encoded, out)
    else:
        over_rows(kernels.decompress(_streaming(out)), encoded.shape[0], out.nbytes, *encoded.arrays, _bits(out))
    return out


def matvec(
    encoded: Bitmap, x: Tensor, out: Float32[Tensor, "*batch rows"] | None = None, backend: str = "auto"
) -> Float32[Tensor, "*batch rows"]:
    """The product of the packed matrix with `x`, [columns] or [batch, columns], read straight from the packed form.

    `x` is real, has any strides, is taken as fp32 and may share memory with `out`. The sums are kept in fp32, in an
    order that depends on the backend and on whether there are several vectors. There is no gradient. Entries of `x`
    must be finite: a backend may multiply the zeros too. For several vectors a CPU with SIMD decodes a few rows at a
    time, which its caches hold, and multiplies them with all; a GPU reads the packed matrix once for sixteen.

    Raises `UserError` for a backend that is unknown, that this machine cannot run or that works on another device than
    the tensors', and `ValueError` for an `x` or `out` of the wrong shape, type or device or that requires a gradient.
    """
    kernels = BACKENDS.choose(backend, encoded.device)
    with operands(x, out, encoded.shape, encoded.device) as (each_x, each_out, result):
        if kernels == CUDA:
            from toolkit.kernels.bitmap import cuda

            cuda.matvec(encoded, each_x, each_out)
        else:
            _matvec(encoded, each_x.to(torch.float32).numpy(), each_out.numpy(), kernels)
    return result


def product(encoded: Bitmap, x: Float32[Tensor, " columns"], out: Float32[Tensor, " rows"]) -> Product:
    """The product of `matvec` on a CPU, to be run again and again with what `x` holds then.

    `x` and `out` are contiguous and share no memory.
    """
    run = BACKENDS.choose("auto").product(encoded.dtype)
    return Product(Task(run, (*encoded.arrays, x.numpy(), out.numpy()), encoded.shape[0], encoded.values.nbytes))


def _matvec(encoded: Bitmap, x: np.ndarray, out: np.ndarray, kernels: BitmapBackend) -> None:
    work = encoded.shape[0], encoded.values.nbytes, *encoded.arrays
    if len(x) > 1 and kernels.decode_and_multiply:
        over_rows(kernels.decode_and_multiply(encoded.dtype), *work, x, out)
        return
    for one, result in zip(x, out, strict=True):
        over_rows(kernels.product(encoded.dtype), *work, one, result)


def _streaming(out: Tensor) -> bool:
    """Whether to write past the caches: only whole cache lines, and only what would not stay in the caches anyway."""
    row_nbytes = out.shape[1] * out.itemsize
    return out.nbytes >= STREAM_BYTES and row_nbytes % CACHE_LINE == 0 and out.data_ptr() % CACHE_LINE == 0


def _bits(tensor: Tensor) -> np.ndarray:
    """The tensor's memory as unsigned integers of the elements' width."""
    return tensor.view(BITS[tensor.dtype]).numpy()

"""Bitmap-packed matrices: one bit per element and the non-zero values (ENDOR, section 4.1).

One door per operation: `encode`, `decompress`, `matvec`. `backend="auto"` takes the CUDA kernels if that is where the
tensors are. On a CPU it takes what was fastest there for this operation and element type: the first large matrix has
that measured once a machine (`toolkit.kernels.runtime.tuning`). Small matrices take the first of `available()`.

    [[1, 0, 0, 2],      bitmap       0b1001, 0b0000, 0b0010   (lowest bit = first column; rows padded to 32 bits)
     [0, 0, 0, 0],      row_offsets  0, 2, 2, 3
     [0, 3, 0, 0]]      values       1, 2, 3

`block_offsets` holds, for each row, the number of its values before column 0, 4096, 8192 ...: here 0, 0, 0.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial

import numpy as np
import torch
from jaxtyping import Float32
from torch import Tensor

from toolkit.errors import UserError
from toolkit.kernels.bitmap import cpu as portable
from toolkit.kernels.bitmap import cpu_simd
from toolkit.kernels.bitmap.layout import BITS, Bitmap, block_count, row_bytes
from toolkit.kernels.bitmap.shared import BLOCK, WORD
from toolkit.kernels.common.simd import CACHE_LINE
from toolkit.kernels.runtime import tuning
from toolkit.kernels.runtime.backends import Backend, choose, runnable
from toolkit.kernels.runtime.contracts import expect, operand
from toolkit.kernels.runtime.program import Product, Task
from toolkit.kernels.runtime.threads import over_rows

__all__ = ["BACKENDS", "BLOCK", "WORD", "Bitmap", "available", "columns", "decompress", "encode", "matvec", "row_bytes"]

# the bits that make an element non-zero: for floats all but the sign, so that −0.0 counts as zero
SIGNIFICANT = {torch.float32: 0x7FFFFFFF, torch.float16: 0x7FFF, torch.bfloat16: 0x7FFF, torch.int8: 0xFF}
STREAM_BYTES = 8 << 20
CUDA = "cuda"
DECODE = "decode"  # a way of `matvec`: rows are decoded into the caches and multiplied there
# fewer elements are not worth measuring; the matrix to measure with fills more than a core's caches, and the batch
# stands for all of more than one vector
LARGE, PROBE, PROBE_BATCH = 1 << 20, (2048, 4096), 4


@dataclass(frozen=True)
class BitmapBackend(Backend):
    """A backend that decodes, too. `product` takes a type and gives the compiled function of rows."""

    decompress: Callable  # streaming -> compiled function of rows
    decode_and_multiply: Callable | None = None  # dtype -> compiled function of rows, for several vectors


def _simd(expand, *features: str) -> BitmapBackend:
    operations = (cpu_simd.matvec, cpu_simd.decompress, cpu_simd.decode_and_multiply)
    return BitmapBackend(frozenset(features), *(partial(operation, expand) for operation in operations))


# fastest first
BACKENDS = {
    "avx512": _simd(cpu_simd.by_instruction, "avx512f", "avx512bw", "avx512vl", "avx512vbmi2"),
    "avx512_widening": _simd(cpu_simd.by_widening, "avx512f", "avx512bw", "avx512vl"),
    "avx2": _simd(cpu_simd.by_shuffle, "avx2", "fma", "f16c"),
    "portable": BitmapBackend(frozenset(), portable.matvec, lambda streaming: portable.decompress),
}


def encode(weight: Tensor) -> Bitmap:
    """Pack a matrix [rows, columns] of float32, float16, bfloat16 or int8.

    Exact to the bit, but for −0.0, which counts as zero and decodes as +0.0. NaN and infinities are non-zeros.
    """
    rows, columns = weight.shape
    dense = _bits(weight)
    bitmap = torch.empty(rows, row_bytes(columns), dtype=torch.uint8)
    words = _words(bitmap)
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
    if backend == "auto" and encoded.device.type == "cpu":
        backend = chosen_decompress(encoded)
    kernels = _choose(backend, encoded.device)
    if out is None:
        out = torch.empty(encoded.shape, dtype=encoded.dtype, device=encoded.device)
    expect("out", out, encoded.dtype, encoded.shape, encoded.device)
    if not isinstance(kernels, Backend):
        kernels.decompress(encoded, out)
    else:
        over_rows(kernels.decompress(_streaming(out)), encoded.shape[0], out.nbytes, *encoded.arrays, _bits(out))
    return out


def matvec(
    encoded: Bitmap, x: Tensor, out: Float32[Tensor, "*batch rows"] | None = None, backend: str = "auto"
) -> Float32[Tensor, "*batch rows"]:
    """The product of the packed matrix with `x`, [columns] or [batch, columns], read straight from the packed form.

    `x` is real, is taken as fp32 and may share memory with `out`. The sums are kept in fp32, in an order that depends
    on the backend. There is no gradient. Entries of `x` must be finite: a backend may multiply the zeros too. A CPU
    reads the packed matrix once for each vector, a GPU once for sixteen. `backend="decode"` decodes a few rows at a
    time on a CPU with SIMD and multiplies them with all vectors.

    Raises `UserError` for a backend that is unknown, that this machine cannot run or that works on another device than
    the tensors', and `ValueError` for an `x` or `out` of the wrong shape, type or device or that requires a gradient.
    """
    if backend == "auto" and encoded.device.type == "cpu":
        backend = chosen_matvec(encoded, x.shape[0] if x.ndim == 2 else 1)
    kernels = _decoding(encoded.device) if backend == DECODE else _choose(backend, encoded.device)
    rows, columns = encoded.shape
    batch = tuple(x.shape[:1] if x.ndim == 2 else ())
    expect("x", x, x.dtype, (*batch, columns), encoded.device)
    if out is None:
        out = torch.empty(*batch, rows, dtype=torch.float32, device=encoded.device)
    expect("out", out, torch.float32, (*batch, rows), encoded.device)
    vectors = batch[0] if batch else 1
    each_x, each_out = operand(x, out).view(vectors, columns), out.detach().view(vectors, rows)
    if not isinstance(kernels, Backend):
        kernels.matvec(encoded, each_x, each_out)
        return out
    given, results = each_x.to(torch.float32).numpy(), each_out.numpy()
    if backend == DECODE:
        run = kernels.decode_and_multiply(encoded.dtype)
        over_rows(run, rows, encoded.values.nbytes, *encoded.arrays, given, results)
        return out
    run = kernels.product(encoded.dtype)
    for one, result in zip(given, results, strict=True):
        over_rows(run, rows, encoded.values.nbytes, *encoded.arrays, one, result)
    return out


def product(
    encoded: Bitmap, x: Float32[Tensor, " columns"], out: Float32[Tensor, " rows"], backend: str = "auto"
) -> Product:
    """The product of `matvec` on a CPU, to be run again and again with what `x` holds then.

    `x` and `out` are contiguous and share no memory.
    """
    backend = chosen_matvec(encoded) if backend == "auto" else backend
    if backend == DECODE:
        run = _decoding(encoded.device).decode_and_multiply(encoded.dtype)
        x, out = x[None], out[None]
    else:
        run = _choose(backend, encoded.device).product(encoded.dtype)
    return Product(Task(run, (*encoded.arrays, x.numpy(), out.numpy()), encoded.shape[0], encoded.values.nbytes))


def available() -> list[str]:
    """The backends that this CPU can run, fastest first."""
    return runnable(BACKENDS)


def chosen_decompress(encoded: Bitmap) -> str:
    """The backend that `decompress` takes on a CPU when it may choose."""
    return _fastest_decompress(encoded.dtype, torch.get_num_threads()) if _large(encoded) else available()[0]


def chosen_matvec(encoded: Bitmap, vectors: int = 1) -> str:
    """The backend, or "decode", that `matvec` takes on a CPU when it may choose."""
    several = vectors > 1
    return _fastest_matvec(encoded.dtype, several, torch.get_num_threads()) if _large(encoded) else available()[0]


def _large(encoded: Bitmap) -> bool:
    return encoded.shape[0] * encoded.shape[1] >= LARGE


@cache
def _fastest_decompress(dtype: torch.dtype, threads: int) -> str:
    names = _simd_backends() or tuple(available())

    def prepare():
        packed = _probe(dtype)
        out = torch.zeros(PROBE, dtype=dtype)
        return {name: partial(decompress, packed, out, name) for name in names}

    return tuning.fastest(f"bitmap decompress {_name(dtype)}", names, prepare, threads)


@cache
def _fastest_matvec(dtype: torch.dtype, several: bool, threads: int) -> str:
    names = (*_simd_backends(), DECODE) if _simd_backends() else tuple(available())
    batch = PROBE_BATCH if several else 1

    def prepare():
        packed, x = _probe(dtype), torch.ones(batch, PROBE[1])
        return {name: partial(matvec, packed, x, None, name) for name in names}

    return tuning.fastest(f"bitmap matvec {_name(dtype)} batch {batch}", names, prepare, threads)


def _probe(dtype: torch.dtype) -> Bitmap:
    """A matrix to measure with: half zeros."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randint(1, 100, PROBE, generator=generator, dtype=torch.int8)
    return encode(weight.masked_fill_(torch.rand(PROBE, generator=generator) < 0.5, 0).to(dtype))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _simd_backends() -> tuple[str, ...]:
    return tuple(name for name in available() if BACKENDS[name].decode_and_multiply)


def _decoding(device: torch.device) -> BitmapBackend:
    """The first backend that decodes and multiplies."""
    if not _simd_backends():
        raise UserError(f"backend {DECODE!r} needs a CPU with SIMD; this one can run: {', '.join(available())}")
    return _choose(_simd_backends()[0], device)


def _choose(name: str, device: torch.device):
    """The `Backend`, or the module of the CUDA kernels, which only those who use it import."""
    chosen = choose(name, BACKENDS, device, for_gpus=[CUDA])
    if chosen != CUDA:
        return chosen
    from toolkit.kernels.bitmap import cuda

    return cuda


def _streaming(out: Tensor) -> bool:
    """Whether to write past the caches: only whole cache lines, and only what would not stay in the caches anyway."""
    row_nbytes = out.shape[1] * out.itemsize
    return out.nbytes >= STREAM_BYTES and row_nbytes % CACHE_LINE == 0 and out.data_ptr() % CACHE_LINE == 0


def _words(bitmap: Tensor) -> np.ndarray:
    return bitmap.numpy().view(np.uint32)


def _bits(tensor: Tensor) -> np.ndarray:
    """The tensor's memory as unsigned integers of the elements' width."""
    return tensor.view(BITS[tensor.dtype]).numpy()

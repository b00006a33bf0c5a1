"""Bitmap-packed matrices: one bit per element and the non-zero values (ENDOR, section 4.1).

One door per operation: `encode`, `decompress`, `matvec`. `backend="auto"` takes the fastest that this CPU can run, or
the CUDA kernels if that is where the tensors are.

    [[1, 0, 0, 2],      bitmap       0b1001, 0b0000, 0b0010   (lowest bit = first column; rows padded to 32 bits)
     [0, 0, 0, 0],      row_offsets  0, 2, 2, 3
     [0, 3, 0, 0]]      values       1, 2, 3

`block_offsets` holds, for each row, the number of its values before column 0, 4096, 8192 ...: here 0, 0, 0.
"""

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from importlib.util import find_spec

import numpy as np
import torch
from jaxtyping import Float32
from torch import Tensor

from toolkit.errors import UserError, unknown
from toolkit.kernels.bitmap import cpu as portable
from toolkit.kernels.bitmap import cpu_simd
from toolkit.kernels.bitmap.layout import BITS, Bitmap, block_count, row_bytes
from toolkit.kernels.bitmap.shared import BLOCK, WORD
from toolkit.kernels.common.contracts import expect
from toolkit.kernels.common.simd import CACHE_LINE, host_has
from toolkit.kernels.common.threads import over_rows

__all__ = ["BACKENDS", "BLOCK", "WORD", "Bitmap", "available", "columns", "decompress", "encode", "matvec", "row_bytes"]

# the bits that make an element non-zero: for floats all but the sign, so that −0.0 counts as zero
SIGNIFICANT = {torch.float32: 0x7FFFFFFF, torch.float16: 0x7FFF, torch.bfloat16: 0x7FFF, torch.int8: 0xFF}
STREAM_BYTES = 8 << 20
CUDA = "cuda"

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Backend:
    """One way to run the kernels on a CPU, and the features it needs of it, by LLVM's names."""

    features: frozenset[str]
    decompress: Callable  # streaming -> compiled function of rows
    matvec: Callable  # dtype -> compiled function of rows


def _simd(expand, *features: str) -> Backend:
    return Backend(frozenset(features), partial(cpu_simd.decompress, expand), partial(cpu_simd.matvec, expand))


# fastest first
BACKENDS = {
    "avx512": _simd(cpu_simd.by_instruction, "avx512f", "avx512bw", "avx512vl", "avx512vbmi2"),
    "avx2": _simd(cpu_simd.by_shuffle, "avx2", "fma", "f16c"),
    "portable": Backend(frozenset(), lambda streaming: portable.decompress, portable.matvec),
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
    words, row_offsets, values = _arrays(encoded)
    found = torch.empty(encoded.values.numel(), dtype=dtype)
    over_rows(portable.positions, encoded.shape[0], values.nbytes, words, row_offsets, found.numpy())
    return found


def decompress(encoded: Bitmap, out: Tensor | None = None, backend: str = "auto") -> Tensor:
    """The dense matrix [rows, columns], in `out` if given, on the device of the packed one.

    Raises `UserError` for a backend that is unknown, that this machine cannot run or that works on another device than
    the tensors', and `ValueError` for an `out` of the wrong shape, type or device.
    """
    kernels = _choose(backend, encoded.device)
    if out is None:
        out = torch.empty(encoded.shape, dtype=encoded.dtype, device=encoded.device)
    expect("out", out, encoded.dtype, encoded.shape, encoded.device)
    if not isinstance(kernels, Backend):
        kernels.decompress(encoded, out)
    else:
        over_rows(kernels.decompress(_streaming(out)), encoded.shape[0], out.nbytes, *_arrays(encoded), _bits(out))
    return out


def matvec(
    encoded: Bitmap, x: Tensor, out: Float32[Tensor, "*batch rows"] | None = None, backend: str = "auto"
) -> Float32[Tensor, "*batch rows"]:
    """The product of the packed matrix with `x`, [columns] or [batch, columns], read straight from the packed form.

    `x` is taken as fp32 and the sums are kept in fp32, in an order that depends on the backend. Entries of `x` must be
    finite: a backend may multiply the zeros too. A CPU reads the matrix once for each vector, a GPU once for sixteen.

    Raises `UserError` for a backend that is unknown, that this machine cannot run or that works on another device than
    the tensors', and `ValueError` for an `x` or `out` of the wrong shape, type or device.
    """
    kernels = _choose(backend, encoded.device)
    rows, columns = encoded.shape
    batch = tuple(x.shape[:1] if x.ndim == 2 else ())
    expect("x", x, x.dtype, (*batch, columns), encoded.device)
    if out is None:
        out = torch.empty(*batch, rows, dtype=torch.float32, device=encoded.device)
    expect("out", out, torch.float32, (*batch, rows), encoded.device)
    each_x, each_out = x.view(batch[0] if batch else 1, columns), out.view(batch[0] if batch else 1, rows)
    if not isinstance(kernels, Backend):
        kernels.matvec(encoded, each_x, each_out)
        return out
    run = kernels.matvec(encoded.dtype)
    for one, result in zip(each_x.to(torch.float32), each_out, strict=True):
        over_rows(run, rows, encoded.values.nbytes, *_arrays(encoded), one.numpy(), result.numpy())
    return out


def available() -> list[str]:
    """The backends that this CPU can run, fastest first."""
    return [name for name, backend in BACKENDS.items() if all(map(host_has, backend.features))]


def _choose(name: str, device: torch.device):
    """The `Backend`, or the module of the CUDA kernels."""
    if name not in ("auto", CUDA, *BACKENDS):
        raise unknown("backend", name, ["auto", CUDA, *BACKENDS])
    if name == CUDA or (name == "auto" and device.type == CUDA):
        return _cuda(device)
    if device.type != "cpu":
        raise UserError(f"backend {name!r} works on the CPU; these tensors are on {device}: move them with .to('cpu')")
    if name == "auto":
        return BACKENDS[_fastest()]
    if name not in available():
        missing = ", ".join(sorted(feature for feature in BACKENDS[name].features if not host_has(feature)))
        raise UserError(f"backend {name!r} needs a CPU with {missing}; this one can run: {', '.join(available())}")
    return BACKENDS[name]


def _cuda(device: torch.device):
    """The CUDA kernels' module, which only those who use it import. Numba's simulator takes tensors on the CPU."""
    if find_spec("numba_cuda") is None:
        raise UserError(f"backend {CUDA!r} needs numba-cuda: pip install 'sparse-offload-toolkit[cuda]'")
    if os.environ.get("NUMBA_ENABLE_CUDASIM") != "1":
        if not torch.cuda.is_available():
            raise UserError(f"backend {CUDA!r} needs a CUDA GPU, and torch sees none; use backend='auto'")
        if device.type != CUDA:
            raise UserError(f"backend {CUDA!r} works on a GPU; the tensors are on {device}: move them with .to('cuda')")
    from toolkit.kernels.bitmap import cuda

    return cuda


@cache
def _fastest() -> str:
    name = available()[0]
    log.info("bitmap kernels: %s backend", name)
    return name


def _streaming(out: Tensor) -> bool:
    """Whether to write past the caches: only whole cache lines, and only what would not stay in the caches anyway."""
    row_nbytes = out.shape[1] * out.itemsize
    return out.nbytes >= STREAM_BYTES and row_nbytes % CACHE_LINE == 0 and out.data_ptr() % CACHE_LINE == 0


def _arrays(encoded: Bitmap) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return _words(encoded.bitmap), encoded.row_offsets.numpy(), _bits(encoded.values)


def _words(bitmap: Tensor) -> np.ndarray:
    return bitmap.numpy().view(np.uint32)


def _bits(tensor: Tensor) -> np.ndarray:
    """The tensor's memory as unsigned integers of the elements' width."""
    return tensor.view(BITS[tensor.dtype]).numpy()

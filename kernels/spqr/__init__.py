"""SpQR matrices: 3-bit weights with two levels of statistics in 64-bit words, and outliers in fp16.

Source: E. Crnčević, "An Efficient Inference Kernel for SpQR", thesis, Graz 2025, chapters 2 and 3; the quantisation is
of Dettmers et al., "SpQR", 2023. `layout` describes the words, `toolkit.kernels.csr` the outliers.

A weight is s · (q − z) + outlier. Its scale s, its zero point z and s · (q − z) are what fp16 arithmetic gives, rounded
after every step, as in spqr_quant; the outlier is then added in fp32. `decode` gives exactly these weights, with the
sign of a zero. Statistics that overflow in fp16 give weights that are not finite, and meaningless products. The
quantiser makes none, and `toolkit.formats` refuses files with them.

Ways to multiply, all with fp32 sums:

    avx512_int16     activations in 16 bits, with one scale for every 16 columns: each is off by at most 1/65,024 of the
                     largest of its 16; integer products; s · (q − z) is not rounded to fp16: at most
                     2⁻¹⁰ · |s| · (|q| + |z|) + 2⁻²⁵ off, if it is finite there
    avx2             the same with fp32 activations
    avx2_table       decodes 16 rows at a time by a look-up table and multiplies: exactly the weights of `decode`
    avx2_arithmetic  the same, each weight converted by itself (thesis, section 3.2, compares the two)
    table            as avx2_table, for any CPU
    arithmetic       as avx2_arithmetic, for any CPU
    cuda_table       on a GPU: exactly the weights of `decode`, codes converted by a look-up table
    cuda_arithmetic  the same, codes converted by arithmetic

`benchmarks/README.md` works out the limits of the product, in bytes and in instructions.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from jaxtyping import Float, Float32, Int32, Int64
from torch import Tensor

from toolkit.kernels import csr, dense
from toolkit.kernels.csr.layout import column_bits
from toolkit.kernels.engine.backends import AVX2, Backend, Backends
from toolkit.kernels.engine.parallel import Product, Task, over_rows
from toolkit.kernels.engine.tensors import FLOAT_BITS, expect, operands
from toolkit.kernels.spqr import cpu, cpu_avx512, cpu_simd
from toolkit.kernels.spqr.layout import Codes, check, pack, tiles, unpack
from toolkit.kernels.spqr.shared import LEVELS, TILE

__all__ = ["BACKENDS", "LEVELS", "TILE", "Codes", "check", "decode", "matvec", "pack", "tiles", "unpack"]

FOR_GPUS = {"cuda_table": True, "cuda_arithmetic": False}  # whether by table; the thesis found that to be faster
ROWS_AT_ONCE = 8 * TILE  # whose columns a GPU puts in order together


@dataclass(frozen=True)
class SpQRBackend(Backend):
    """A backend that decodes, too. `product` takes storage of outliers and bits of a column, and gives the function."""

    decode: Callable  # of the same, a type, and whether columns are put in order -> compiled function of tile rows
    prepare: Callable | None = None  # compiled: activations, prepared ones, a scale and a sum for each tile
    prepared: type = np.float32  # the type of the prepared activations


def _decoding(family, multiply: str, by_table: bool) -> SpQRBackend:
    decode, dense_backend = family.decode_stripe(by_table), dense.BACKENDS[multiply]
    product = partial(cpu.product, decode, dense_backend.product)
    return SpQRBackend(dense_backend.features, product, partial(cpu.decoded, decode))


def _fused(features: frozenset[str], kernel: cpu_simd.Fused) -> SpQRBackend:
    decode = partial(cpu.decoded, cpu_simd.decode_stripe(True))
    return SpQRBackend(features, partial(cpu_simd.product, kernel), decode, kernel.prepare, kernel.prepared)


BACKENDS = Backends(
    {
        "avx512_int16": _fused(AVX2 | {"avx512f", "avx512bw", "avx512vbmi", "avx512vnni"}, cpu_avx512.INT16),
        "avx2": _fused(AVX2, cpu_simd.FLOAT),
        "avx2_table": _decoding(cpu_simd, "avx2", True),
        "avx2_arithmetic": _decoding(cpu_simd, "avx2", False),
        "table": _decoding(cpu, "portable", True),
        "arithmetic": _decoding(cpu, "portable", False),
    },
    for_gpus=[*FOR_GPUS],
)


def decode(
    words: Int64[Tensor, "tall wide 16"],
    outliers: csr.Outliers,
    out: Float[Tensor, "rows columns"] | None = None,
    backend: str = "auto",
    order: Int32[Tensor, " columns"] | None = None,
) -> Float[Tensor, "rows columns"]:
    """The dense matrix, of the outliers' shape: fp32, or rounded once to the type of `out`.

    Column i of the words is column `order[i]` of the matrix; without an `order` both are the same.

    Raises `UserError` for a backend that is unknown, that this machine cannot run or that works on another device, and
    `ValueError` for `words` or an `out` of the wrong shape, type or device.
    """
    shape, device = outliers.shape, outliers.offsets.device
    expect("words", words, torch.int64, (*tiles(shape), TILE), device)
    out = torch.empty(shape, dtype=torch.float32, device=device) if out is None else out
    expect("out", out, out.dtype, shape, device)
    if not out.is_floating_point():
        raise ValueError(f"out is {out.dtype}; expected a floating-point type")
    kernels = BACKENDS.choose(backend, device)
    if kernels in FOR_GPUS:
        from toolkit.kernels.spqr import cuda

        cuda.decode(words, outliers, out, FOR_GPUS[kernels])
        if order is not None:
            places = order.argsort()
            for rows in out.split(ROWS_AT_ONCE):  # a GPU's memory has no room for a second matrix
                rows.copy_(rows.index_select(1, places))
        return out
    if out.dtype not in FLOAT_BITS:
        return out.copy_(decode(words, outliers, None, backend, order))
    run = kernels.decode(outliers.name, column_bits(shape[1]), out.dtype, order is not None)
    bits = out.view(FLOAT_BITS[out.dtype]).numpy()
    over_rows(run, len(words), out.nbytes, *_arrays(words, outliers), _places(order), bits)
    return out


def matvec(
    words: Int64[Tensor, "tall wide 16"],
    outliers: csr.Outliers,
    x: Float[Tensor, "*batch columns"],
    out: Float32[Tensor, "*batch rows"] | None = None,
    backend: str = "auto",
) -> Float32[Tensor, "*batch rows"]:
    """The product of the matrix with `x`, [columns] or [batch, columns], taken as fp32 and finite.

    The matrix is read from memory once for all vectors, on a GPU for sixteen. On a GPU "auto" takes cuda_table. 16 bits
    round an activation by at most 1 / 65,024 of the largest of its 16 columns. avx2 loses bits of entries below 2⁻⁹⁹,
    which it divides by up to 2²⁷.

    Raises `UserError` for a backend that is unknown, that this machine cannot run or that works on another device, and
    `ValueError` for tensors of the wrong shape, type or device.
    """
    device = outliers.offsets.device
    expect("words", words, torch.int64, (*tiles(outliers.shape), TILE), device)
    kernels = BACKENDS.choose(backend, device)
    with operands(x, out, outliers.shape, device) as (each_x, each_out, result):
        if kernels in FOR_GPUS:
            from toolkit.kernels.spqr import cuda

            cuda.matvec(words, outliers, each_x, each_out, FOR_GPUS[kernels])
        else:
            given = _padded(each_x, words.shape[1] * TILE).numpy()
            product = _product(kernels, words, outliers, given, each_out.numpy())
            for task in (*product.before, product.task):
                task()
    return result


def product(
    words: Int64[Tensor, "tall wide 16"],
    outliers: csr.Outliers,
    x: Float32[Tensor, " columns"],
    out: Float32[Tensor, " rows"],
    order: Int32[Tensor, " columns"] | None = None,
) -> Product:
    """The product of `matvec` on a CPU with `x[order]`, to be run again and again with what `x` holds then.

    `x` and `out` are contiguous and share no memory.
    """
    columns = words.shape[1] * TILE
    given, before = x[None].numpy(), ()
    if order is not None or columns != len(x):
        given = np.zeros((1, columns), np.float32)
        arranged = Task(cpu.pad, (x.numpy(), given))
        if order is not None:
            arranged = Task(cpu.arrange, (x.numpy(), order.numpy(), given))
        before = (arranged,)
    made = _product(BACKENDS.choose("auto"), words, outliers, given, out[None].numpy())
    return replace(made, before=(*before, *made.before))


def _padded(x: Float[Tensor, "vectors columns"], columns: int) -> Float32[Tensor, "vectors padded"]:
    """The vectors in fp32, with zeros for the padding of the matrix."""
    return torch.nn.functional.pad(x.to(torch.float32), (0, columns - x.shape[1]))


def _product(kernels: SpQRBackend, words: Tensor, outliers: csr.Outliers, x: np.ndarray, out: np.ndarray) -> Product:
    """The product of the padded vectors `x`, and what prepares them for it."""
    given, before = (x,), ()
    if kernels.prepare is not None:
        of_tiles = (len(x), x.shape[1] // TILE)
        made = (np.empty(x.shape, kernels.prepared), np.empty(of_tiles, np.float32), np.empty(of_tiles, np.float32))
        given, before = (x, *made), (Task(kernels.prepare, (x, *made)),)
    run = kernels.product(outliers.name, column_bits(outliers.shape[1]))
    return Product(Task(run, (*_arrays(words, outliers), *given, out), len(words), words.nbytes), before)


def _places(order: Tensor | None) -> np.ndarray:
    """Where each column of the matrix lies in the words. An order of the columns, whatever `order` holds."""
    return np.empty(0, np.uint32) if order is None else order.argsort().numpy().astype(np.uint32)


def _arrays(words: Tensor, outliers: csr.Outliers) -> tuple[np.ndarray, ...]:
    return words.numpy().view(np.uint64), *outliers.arrays

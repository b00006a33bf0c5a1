"""Huffman-coded matrices: one byte of each element in a code of 1 to 11 bits, the others as they are. No bit is lost.

Exponents of weights are alike: those of bf16 need 2.6 bits in place of 8 (DFloat11, arXiv:2504.11651). One door per
operation: `encode`, `decode`, `matvec`. `backend="auto"` takes the first of `BACKENDS` that this CPU can run.

    bf16  1.0, −1.5, 2.0, 1.0    exponents  127, 127, 128, 127      codes  0 0 1 0
                                 sign and mantissa  0x00, 0xC0, 0x00, 0x00, as they are
"""

import numpy as np
import torch
from jaxtyping import Float32
from torch import Tensor

from toolkit.kernels.engine.backends import AVX2, Backend, Backends
from toolkit.kernels.engine.parallel import Product, Task, over_rows
from toolkit.kernels.engine.tensors import BITS, expect, operands
from toolkit.kernels.huffman import cpu
from toolkit.kernels.huffman.code import code_lengths, fill_table
from toolkit.kernels.huffman.layout import Coded, coded_bytes, rest_bytes, row_offsets
from toolkit.kernels.huffman.shared import SYMBOLS

__all__ = ["BACKENDS", "Coded", "decode", "encode", "matvec", "product"]

BACKENDS = Backends(
    {"avx2": Backend(AVX2, cpu.matvec), "portable": Backend(frozenset(), cpu.portable_matvec)}, for_gpus=()
)


def encode(weight: Tensor) -> Coded:
    """Code a matrix [rows, columns] of float32, float16, bfloat16 or int8, each element to the bit."""
    rows, columns = weight.shape
    bits = weight.view(BITS[weight.dtype]).numpy()
    symbols = np.empty((rows, columns), np.uint8)
    rest = torch.empty(rows, rest_bytes(columns, weight.dtype), dtype=torch.uint8)
    over_rows(cpu.split(weight.dtype), rows, bits.nbytes, bits, symbols, rest.numpy())
    lengths = code_lengths(np.bincount(symbols.ravel(), minlength=SYMBOLS))
    taken = np.empty(rows, np.int64)
    over_rows(cpu.count_bits, rows, symbols.nbytes, symbols, lengths, taken)
    offsets = row_offsets(taken)
    coded = np.zeros(coded_bytes(offsets), np.uint8)
    over_rows(cpu.write_codes, rows, symbols.nbytes, symbols, lengths, offsets, coded)
    stored = map(torch.from_numpy, (lengths, offsets, coded))
    return Coded((rows, columns), weight.dtype, *stored, rest)


def decode(packed: Coded, out: Tensor | None = None) -> Tensor:
    """The dense matrix [rows, columns], in `out` if given. Raises `ValueError` for an `out` of the wrong kind."""
    out = torch.empty(packed.shape, dtype=packed.dtype) if out is None else out
    expect("out", out, packed.dtype, packed.shape, packed.device)
    _fill_table(packed)
    dense = out.view(BITS[out.dtype]).numpy()
    over_rows(cpu.decode(packed.dtype), packed.shape[0], out.nbytes, *packed.arrays, dense)
    return out


def matvec(
    packed: Coded, x: Tensor, out: Float32[Tensor, "*batch rows"] | None = None, backend: str = "auto"
) -> Float32[Tensor, "*batch rows"]:
    """The product of the coded matrix with `x`, [columns] or [batch, columns]: a few rows are decoded at a time.

    `x` is real, has any strides, is taken as fp32 and may share memory with `out`. Sums are in fp32, and those of a row
    depend on the backend only. There is no gradient.

    Raises `UserError` for a backend that is unknown or that this CPU cannot run, and `ValueError` for an `x` or `out`
    of the wrong shape, type or device or that requires a gradient.
    """
    with operands(x, out, packed.shape, packed.device) as (each_x, each_out, result):
        _fill_table(packed)
        _task(packed, each_x.to(torch.float32), each_out, backend)()
    return result


def product(packed: Coded, x: Float32[Tensor, " columns"], out: Float32[Tensor, " rows"]) -> Product:
    """The same product of one vector, to be run again and again with what `x` and the packed matrix hold then.

    `x` and `out` are contiguous and share no memory.
    """
    filling = Task(fill_table, (packed.lengths.numpy(), packed.arrays[2]))
    return Product(_task(packed, x[None], out[None]), before=(filling,))


def _task(packed: Coded, x: Tensor, out: Tensor, backend: str = "auto") -> Task:
    run = BACKENDS.choose(backend, packed.device).product(packed.dtype)
    nbytes = packed.coded.nbytes + packed.rest.nbytes
    return Task(run, (*packed.arrays, x.numpy(), out.numpy()), packed.shape[0], nbytes)


def _fill_table(packed: Coded) -> None:
    fill_table(packed.lengths.numpy(), packed.arrays[2])

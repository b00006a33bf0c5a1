"""The registry of formats that a weight matrix can be stored in, and the doors to pack, unpack and size one."""

from collections import ChainMap

import torch
from torch import Tensor

from toolkit.errors import unknown
from toolkit.formats.codecs import LZ4, Zstd
from toolkit.formats.csr import CSR
from toolkit.formats.dense import Dense
from toolkit.formats.endor import Endor
from toolkit.formats.packed import FormatError, Packed, as_matrix
from toolkit.formats.spqr import SpQRMatrix, SpQRTransposed
from toolkit.formats.two_four import TwoFour

__all__ = ["FORMATS", "QUANTISED", "READABLE", "FormatError", "Packed", "decode", "encode", "expected_nbytes"]

FORMATS: dict[str, type[Packed]] = {cls.name: cls for cls in (Endor, CSR, TwoFour, Zstd, LZ4, Dense)}
# these decode to what a quantiser chose, not to the weight that was packed, and hold floating-point weights only;
# what is stored is looked up in `READABLE`, which has all of them
QUANTISED: dict[str, type[SpQRMatrix]] = {cls.name: cls for cls in (SpQRMatrix, SpQRTransposed)}
READABLE = ChainMap(FORMATS, QUANTISED)


def encode(name: str, weight: Tensor) -> Packed:
    """Pack a matrix [rows, columns] of float32, float16, bfloat16 or int8. A tensor on a GPU is copied to the CPU.

    A format of `QUANTISED` rounds the weights, in its plainest way.

    Raises `UserError` for an unknown format, or for a tensor that the format cannot hold.
    """
    return _format(name).encode(as_matrix(weight))


def decode(encoded: Packed) -> Tensor:
    """The dense matrix that was packed, to the bit, except that `endor`, `csr` and `two_four` turn −0.0 into +0.0."""
    return encoded.decode()


def expected_nbytes(name: str, shape: tuple[int, int], sparsity: float, dtype: torch.dtype) -> int:
    """The `nbytes` of a packed matrix of this shape, share of zeros and type, without packing one.

    Raises `UserError` for an unknown format, and for `zstd`, `lz4` and `spqr_ptcsr`, whose sizes depend on the values.
    """
    return _format(name).expected_nbytes(shape, sparsity, dtype)


def _format(name: str) -> type[Packed]:
    if name not in READABLE:
        raise unknown("format", name, READABLE)
    return READABLE[name]

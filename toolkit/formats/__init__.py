"""The registry of formats that a weight matrix can be stored in, and the doors to pack, unpack and size one."""

from collections import ChainMap

import torch
from torch import Tensor

from toolkit.errors import UserError, unknown
from toolkit.formats.csr import CSR
from toolkit.formats.dense import Dense
from toolkit.formats.endor import Endor
from toolkit.formats.huffman import Huffman
from toolkit.formats.packed import FormatError, Packed, as_matrix
from toolkit.formats.spqr import SpQRMatrix, SpQRTransposed
from toolkit.formats.two_four import TwoFour
from toolkit.formats.zstd import Zstd

__all__ = ["FORMATS", "QUANTISED", "READABLE", "FormatError", "Packed", "decode", "encode", "expected_nbytes"]

FORMATS: dict[str, type[Packed]] = {cls.name: cls for cls in (Endor, CSR, TwoFour, Huffman, Zstd, Dense)}
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
    """The dense matrix [rows, columns] that was packed, in its type and to the bit, but for +0.0 in place of −0.0.

    Raises `FormatError` for parts that do not belong together, and `UserError` for what is not packed.
    """
    if not isinstance(encoded, Packed):
        raise UserError(f"a {type(encoded).__name__} is not packed: expected what encode gives")
    return encoded.decode()


def expected_nbytes(name: str, shape: tuple[int, int], sparsity: float, dtype: torch.dtype) -> int:
    """The `nbytes` of a packed matrix of this shape, share of zeros and type, without packing one.

    Raises `UserError` for an unknown format, and for one whose size depends on the values: `huffman`,
    `zstd` and `spqr_ptcsr`.
    """
    return _format(name).expected_nbytes(shape, sparsity, dtype)


def _format(name: str) -> type[Packed]:
    if name not in READABLE:
        raise unknown("format", name, READABLE)
    return READABLE[name]

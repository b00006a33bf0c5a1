"""The registry of formats that a weight matrix can be stored in, and the doors to pack, unpack, size and load one."""

import os

import torch
from torch import Tensor

from toolkit.errors import unknown
from toolkit.formats.codecs import LZ4, Zstd
from toolkit.formats.csr import CSR
from toolkit.formats.dense import Dense
from toolkit.formats.endor import Endor
from toolkit.formats.packed import FormatError, Packed, as_matrix, read
from toolkit.formats.two_four import TwoFour

__all__ = ["FORMATS", "FormatError", "Packed", "decode", "encode", "expected_nbytes", "load"]

FORMATS: dict[str, type[Packed]] = {cls.name: cls for cls in (Endor, CSR, TwoFour, Zstd, LZ4, Dense)}


def encode(name: str, weight: Tensor) -> Packed:
    """Pack a matrix [rows, columns] of float32, float16, bfloat16 or int8. A tensor on a GPU is copied to the CPU.

    Raises `UserError` for an unknown format, or for a tensor that the format cannot hold.
    """
    return _format(name).encode(as_matrix(weight))


def decode(encoded: Packed) -> Tensor:
    """The dense matrix that was packed, to the bit, except that `endor`, `csr` and `two_four` turn −0.0 into +0.0."""
    return encoded.decode()


def load(path: str | os.PathLike) -> Packed:
    """Read a packed matrix of any format. Raises `FormatError` for a damaged file, or one of another program."""
    metadata, tensors = read(path)
    if metadata["format"] not in FORMATS:
        raise FormatError(f"{path}: {unknown('format', metadata['format'], FORMATS)}")
    return FORMATS[metadata["format"]].from_file(path, metadata, tensors)


def expected_nbytes(name: str, shape: tuple[int, int], sparsity: float, dtype: torch.dtype) -> int:
    """The `nbytes` of a packed matrix of this shape, share of zeros and type, without packing one.

    Raises `UserError` for an unknown format, and for `zstd` and `lz4`, whose sizes depend on the values.
    """
    return _format(name).expected_nbytes(shape, sparsity, dtype)


def _format(name: str) -> type[Packed]:
    if name not in FORMATS:
        raise unknown("format", name, FORMATS)
    return FORMATS[name]

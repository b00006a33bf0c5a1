"""Matrices in llama.cpp's own types of few bits, quantised by llama.cpp itself."""

import ctypes
import functools
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from toolkit.errors import UserError
from toolkit.measure import llama_cpp

REPEATED_ROWS = 64
NEED_IMPORTANCE = ("IQ2_XXS", "IQ2_XS", "IQ1_S")  # `ggml_quantize_requires_imatrix`


@dataclass(frozen=True, eq=False)
class GgufMatrix:
    """A matrix in a type of GGUF, as the file would hold it."""

    kind: str
    data: UInt8[np.ndarray, "rows bytes"]

    @classmethod
    def encode(
        cls, weight: Float[Tensor, "rows columns"], kind: str, importance: Float[Tensor, " columns"] | None = None
    ) -> "GgufMatrix":
        """Quantise a matrix by llama.cpp.

        `importance` are the weights of its columns' squared errors, a column of llama.cpp's importance matrix: the mean
        squares of the inputs that they are multiplied with. Raises `UserError` if llama.cpp cannot be installed, for
        rows that are not whole blocks of the type, since llama.cpp would write beyond their end, and for a type of
        `NEED_IMPORTANCE` without it, since llama.cpp would abort.
        """
        import gguf

        number, (rows, columns) = gguf.GGMLQuantizationType[kind], weight.shape
        block, nbytes = gguf.GGML_QUANT_SIZES[number]
        if columns % block:
            raise UserError(f"{kind}: rows of {columns} values; expected a multiple of {block}, the values of a block")
        if importance is None and kind in NEED_IMPORTANCE:
            raise UserError(f"{kind}: llama.cpp quantises to this type only with an importance matrix")
        values, weights = np.ascontiguousarray(weight.float().numpy()), None
        if importance is not None:
            weights = np.ascontiguousarray(importance.float().numpy())
            assert weights.shape == (columns,), f"{weights.shape} weights of {columns} columns"
        data = np.zeros((rows, columns // block * nbytes), np.uint8)
        matrix = None if weights is None else weights.ctypes.data
        written = _quantize_chunk()(number, values.ctypes.data, data.ctypes.data, 0, rows, columns, matrix)
        assert written == data.nbytes, f"llama.cpp wrote {written} bytes of {kind}, and {data.nbytes} were expected"
        return cls(kind, data)

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks."""
        return self.data.nbytes

    def decode(self) -> Float[Tensor, "rows columns"]:
        """The dense weight, float32."""
        import gguf

        return torch.from_numpy(gguf.quants.dequantize(self.data, gguf.GGMLQuantizationType[self.kind]))


def repeated(values: Float[np.ndarray, "rows columns"], kind: str) -> UInt8[np.ndarray, "rows bytes"]:
    """Blocks for a matrix of which only time is measured: its first rows, quantised, again and again.

    Quantising all of a large model takes minutes, and no product takes longer or shorter for other values.
    """
    some = GgufMatrix.encode(torch.from_numpy(values[:REPEATED_ROWS]), kind).data
    return np.tile(some, (-(-len(values) // len(some)), 1))[: len(values)]


@functools.cache
def _quantize_chunk():
    """ggml's function: type, values, result, first value, rows, columns, importance of columns -> bytes written."""
    function = ctypes.CDLL(str(llama_cpp.library())).ggml_quantize_chunk
    function.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, *[ctypes.c_int64] * 3, ctypes.c_void_p]
    function.restype = ctypes.c_size_t
    return function

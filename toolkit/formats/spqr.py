"""SpQR: 3-bit weights with two levels of statistics in 64-bit words, and outliers in fp16 (`toolkit.kernels.spqr`)."""

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Self

import torch
from jaxtyping import Int32, Int64
from torch import Tensor

from toolkit.errors import UserError
from toolkit.formats.packed import Packed, all_finite, expect
from toolkit.kernels import csr, spqr
from toolkit.kernels.csr.layout import word_dtype
from toolkit.kernels.engine import tuning
from toolkit.kernels.engine.parallel import Product
from toolkit.kernels.engine.tensors import check_operand
from toolkit.quantization import spqr as quantiser
from toolkit.quantization.spqr import Quantised

ROWS_AT_ONCE = 8 * spqr.TILE  # decoded at a time where rows are checked, so that they stay in the cache


@dataclass(frozen=True, eq=False)
class SpQRMatrix(Packed):
    """A quantised matrix, of any shape, with its outliers by rows. It decodes to the quantiser's choice.

    The words and outliers are those of the library spqr_quant. Rows and columns are padded to multiples of 16 in the
    words alone: with codes 0, which nothing reads. `dtype` is the type of the dense weight; decoding rounds to it once.
    A column above 65,535 makes the words of all outliers twice as wide. Column i of words and outliers is column
    `permutation[i]` of the weight; without a permutation the order is the same.

    Raises `ValueError` for tensors that do not fit the shape, and for integers.
    """

    name = "spqr"
    has_matvec = True
    has_batched_matvec = True
    multiplied_packed = True
    storage: ClassVar[str] = "csr"

    shape: tuple[int, int]
    dtype: torch.dtype
    words: Int64[Tensor, "tall wide 16"]
    offsets: Int32[Tensor, " lines+1"]
    col_vals: Tensor  # [outliers] int32 or int64
    permutation: Int32[Tensor, " columns"] | None = None

    def __post_init__(self):
        """Refuse tensors of other types and shapes."""
        rows, columns = self.shape
        if not self.dtype.is_floating_point:
            raise ValueError(f"SpQR stands for floating-point weights; the header says {self.dtype}")
        expect("words", self.words, torch.int64, (*spqr.tiles(self.shape), spqr.TILE))
        lines = -(-rows // csr.STORAGES[self.storage].rows_at_once)
        expect("offsets", self.offsets, torch.int32, (lines + 1,))
        expect("col_vals", self.col_vals, word_dtype(columns), (self.col_vals.numel(),))
        if self.permutation is not None:
            expect("permutation", self.permutation, torch.int32, (columns,))

    @cached_property
    def outliers(self) -> csr.Outliers:
        """The outliers, for the kernels. Raises `ValueError` unless the last offset equals the number of words."""
        return csr.STORAGES[self.storage](tuple(self.shape), self.offsets, self.col_vals)

    @classmethod
    def encode(cls, weight: Tensor) -> Self:
        """Quantise by rounding to the nearest level, with 1 % of outliers; see `from_quantised` for better ways.

        Raises `UserError` for integers and for what `toolkit.quantization.spqr.SpQR.round` refuses.
        """
        if not weight.is_floating_point():
            raise UserError(f"cannot quantise a weight of {weight.dtype}; expected float32, float16 or bfloat16")
        return cls.from_quantised(quantiser.SpQR().round(weight), weight.dtype)

    @classmethod
    def from_quantised(cls, quantised: Quantised, dtype: torch.dtype) -> Self:
        """Pack what a quantiser chose for a weight of this type."""
        shape, permutation = quantised.codes.shape, quantised.permutation
        outliers = csr.encode(cls.storage, shape, quantised.rows, quantised.columns, quantised.values)
        order = None if permutation is None else permutation.to(torch.int32)
        return cls(shape, dtype, quantised.words, outliers.offsets, outliers.col_vals, order)

    @classmethod
    def expected_nbytes(cls, shape: tuple[int, int], sparsity: float, dtype: torch.dtype) -> int:
        """`nbytes` of what `encode` makes, whatever the zeros. Another order of columns adds four bytes a column."""
        if cls.storage != "csr":  # rows are padded to the longest of sixteen
            return super().expected_nbytes(shape, sparsity, dtype)
        rows, columns = shape
        tall, wide = spqr.tiles(shape)
        outliers = round(quantiser.SpQR.outliers * rows * columns) * word_dtype(columns).itemsize
        return 8 * spqr.TILE * tall * wide + 4 * (rows + 1) + outliers

    @property
    def bits_per_weight(self) -> float:
        """All stored bits over the weights, padding included; 0 without weights."""
        return 8 * self.nbytes / max(1, self.shape[0] * self.shape[1])

    def _fill(self, out: Tensor) -> None:
        spqr.decode(self.words, self.outliers, out, order=self.permutation)

    def _padded_rows(self, first: int, last: int) -> Tensor:
        """Whole tiles of rows in the order of the words' columns, with what pads the words behind them."""
        step = csr.STORAGES[self.storage].rows_at_once
        offsets = self.offsets[first // step : -(-last // step) + 1]
        words = self.words[first // spqr.TILE : -(-last // spqr.TILE)]
        outliers = self.col_vals[int(offsets[0]) : int(offsets[-1])]
        shape = last - first, spqr.TILE * words.shape[1]
        return type(self)(shape, self.dtype, words, offsets - offsets[0], outliers).decode()

    def matvec(self, x: Tensor) -> Tensor:
        """The matrix times `x` [*batch, columns], fp32, read packed; `toolkit.kernels.spqr` has its errors."""
        check_operand(x)
        return spqr.matvec(self.words, self.outliers, x if self.permutation is None else x[..., self.permutation])

    def product(self, x: Tensor, out: Tensor) -> Product:
        """The same, to be run again and again."""
        return spqr.product(self.words, self.outliers, x, out, self.permutation)

    def check(self) -> None:
        """Words are padded with zeros and hold finite statistics; outliers are finite, in order and in the matrix.

        The permutation names every column once. No weight overflows, nor does the value of code 0 in the padding.
        """
        spqr.check(self.words, self.shape)
        self.outliers.check()
        if self.permutation is not None:
            named = self.permutation.sort().values
            if not torch.equal(named, torch.arange(self.shape[1], dtype=torch.int32)):
                raise ValueError(f"the permutation does not name each of {self.shape[1]} columns once")
        for first in range(0, self.shape[0], ROWS_AT_ONCE):
            last = min(first + ROWS_AT_ONCE, self.shape[0])
            if not all_finite(self._padded_rows(first, last)):
                raise ValueError(f"a weight of rows {first} to {last - 1} is too large for fp16: it is not finite")


class SpQRTransposed(SpQRMatrix):
    """The same with outliers in PTCSR: sixteen rows are padded to the longest of them and stored column by column."""

    name = "spqr_ptcsr"
    storage = "ptcsr"


def fastest(quantised: Quantised, dtype: torch.dtype) -> SpQRMatrix:
    """The matrix with its outliers in CSR or PTCSR, whichever multiplies faster here: measured for each matrix.

    PTCSR takes more bytes, so it must be clearly faster (`tuning.choose`).
    """
    made = {form.name: form.from_quantised(quantised, dtype) for form in (SpQRMatrix, SpQRTransposed)}
    x = torch.ones(quantised.codes.shape[1])
    seconds = tuning.measure({name: lambda packed=packed: packed.matvec(x) for name, packed in made.items()})
    return made[tuning.choose(tuple(made), seconds)]

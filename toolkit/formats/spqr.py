"""SpQR: 3-bit weights with two levels of statistics in 64-bit words, and outliers in fp16 (`toolkit.kernels.spqr`)."""

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Self

import torch
from jaxtyping import Int32, Int64
from torch import Tensor

from toolkit.errors import UserError
from toolkit.formats.packed import Packed
from toolkit.kernels import csr, spqr
from toolkit.kernels.common.contracts import expect
from toolkit.quantization import spqr as quantiser
from toolkit.quantization.spqr import Quantised


@dataclass(frozen=True, eq=False)
class SpQR(Packed):
    """A quantised matrix, of any shape, with its outliers by rows. It decodes to what the quantiser chose.

    The words and outliers are those of the library spqr_quant. Rows and columns are padded to multiples of 16 in the
    words alone: with codes 0, which nothing reads. `dtype` is the type of the dense weight; decoding rounds to it once.
    A column above 65,535 makes the words of all outliers twice as wide.

    Raises `ValueError` for tensors that do not fit the shape, and for integers.
    """

    name = "spqr"
    has_matvec = True
    storage: ClassVar[str] = "csr"

    shape: tuple[int, int]
    dtype: torch.dtype
    words: Int64[Tensor, "tall wide 16"]
    offsets: Int32[Tensor, " lines+1"]
    col_vals: Tensor  # [outliers] int32 or int64

    def __post_init__(self):
        """Refuse what the kernels would read wrongly."""
        if not self.dtype.is_floating_point:
            raise ValueError(f"SpQR stands for floating-point weights; the header says {self.dtype}")
        expect("words", self.words, torch.int64, (*spqr.tiles(self.shape), spqr.TILE), self.words.device)
        _ = self.outliers

    @cached_property
    def outliers(self) -> csr.Outliers:
        """The outliers, as the kernels take them."""
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
        """Pack what a quantiser chose for a weight of this type. Raises `UserError` if it reordered the columns."""
        if quantised.permutation is not None:
            raise UserError("this format has no place for an order of columns; quantise with reorder=False")
        shape = quantised.codes.shape
        outliers = csr.encode(cls.storage, shape, quantised.rows, quantised.columns, quantised.values)
        return cls(shape, dtype, spqr.pack(quantised.codes), outliers.offsets, outliers.col_vals)

    @property
    def bits_per_weight(self) -> float:
        """All stored bits over the weights, padding included; 0 without weights."""
        return 8 * self.nbytes / max(1, self.shape[0] * self.shape[1])

    def _fill(self, out: Tensor) -> None:
        spqr.decode(self.words, self.outliers, out)

    def matvec(self, x: Tensor) -> Tensor:
        """The matrix times `x` [columns] in fp32, read straight from the packed form."""
        return spqr.matvec(self.words, self.outliers, x)

    def check(self) -> None:
        """Words are padded with zeros and hold finite statistics; outliers are finite, in order and in the matrix."""
        spqr.check(self.words, self.shape)
        self.outliers.check()


class SpQRTransposed(SpQR):
    """The same with outliers in PTCSR: sixteen rows are padded to the longest of them and stored column by column."""

    name = "spqr_ptcsr"
    storage = "ptcsr"

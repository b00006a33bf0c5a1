"""Lossless: the exponents of a matrix in a Huffman code, signs and mantissas as they are (DFloat11, ZipNN)."""

from dataclasses import dataclass
from typing import Self

from torch import Tensor

from toolkit.formats.packed import Packed
from toolkit.kernels import huffman
from toolkit.kernels.engine.parallel import Product
from toolkit.kernels.huffman import Coded


@dataclass(frozen=True, eq=False)
class Huffman(Coded, Packed):
    """One byte of each element in a code of at most 11 bits, the others as they are. Every bit is kept, −0.0 too.

    The coded byte is the exponent of a bf16 or fp32 number, the exponent with three bits of the mantissa of an fp16 one
    and all of an int8 one. A matrix has a code of its own, which takes 256 bytes. Each row begins on a whole byte, and
    its place (8 bytes) is stored, so that rows decode independently. DFloat11 (arXiv:2504.11651, section 2.3) has codes
    of up to 32 bits and cuts them by bytes instead; ZipNN (arXiv:2411.05239) codes blocks of 256 KB with a code each.

        bf16 [[1, -1.5, 2, 1]]    exponents 127, 127, 128, 127: lengths 1 (of 127), 1 (of 128)
                                  coded     0b0100    row_offsets 0, 4
                                  rest      0x00, 0xC0, 0x00, 0x00: sign and mantissa
    """

    name = "huffman"
    has_matvec = True
    has_batched_matvec = True

    @classmethod
    def encode(cls, weight: Tensor) -> Self:
        """Pack a matrix."""
        return cls(**vars(huffman.encode(weight)))

    def _fill(self, out: Tensor) -> None:
        huffman.decode(self, out)

    def matvec(self, x: Tensor) -> Tensor:
        """The product with `x` [*batch, columns], decoded a few rows at a time, as fp32 [*batch, rows]."""
        return huffman.matvec(self, x)

    def product(self, x: Tensor, out: Tensor) -> Product:
        """The same, to be run again and again."""
        return huffman.product(self, x, out)

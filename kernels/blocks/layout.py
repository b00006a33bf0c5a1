"""The block types of ggml, as GGUF files hold them: a row is blocks of so many elements and bytes, one after another.

Source: `ggml.h` and `ggml-common.h` of ggml (MIT). A type's number is what files and the library call it.
"""

from typing import NamedTuple


class Layout(NamedTuple):
    """A block type: its number, and the elements and bytes of a block."""

    number: int
    elements: int
    nbytes: int

    def row_bytes(self, columns: int) -> int:
        """Bytes of a row. Raises `ValueError` unless the columns fill whole blocks."""
        if columns % self.elements:
            raise ValueError(f"{columns} columns; expected a multiple of {self.elements}, which one block holds")
        return columns // self.elements * self.nbytes


PLAIN = ("F32", "F16", "BF16")  # types of single numbers
LAYOUTS = {
    "F32": Layout(0, 1, 4),
    "F16": Layout(1, 1, 2),
    "BF16": Layout(30, 1, 2),
    "Q4_0": Layout(2, 32, 18),
    "Q4_1": Layout(3, 32, 20),
    "Q5_0": Layout(6, 32, 22),
    "Q5_1": Layout(7, 32, 24),
    "Q8_0": Layout(8, 32, 34),
    "Q2_K": Layout(10, 256, 84),
    "Q3_K": Layout(11, 256, 110),
    "Q4_K": Layout(12, 256, 144),
    "Q5_K": Layout(13, 256, 176),
    "Q6_K": Layout(14, 256, 210),
    "IQ1_S": Layout(19, 256, 50),
    "IQ1_M": Layout(29, 256, 56),
    "IQ2_XXS": Layout(16, 256, 66),
    "IQ2_XS": Layout(17, 256, 74),
    "IQ2_S": Layout(22, 256, 82),
    "IQ3_XXS": Layout(18, 256, 98),
    "IQ3_S": Layout(21, 256, 110),
    "IQ4_NL": Layout(20, 32, 18),
    "IQ4_XS": Layout(23, 256, 136),
    "TQ1_0": Layout(34, 256, 54),
    "TQ2_0": Layout(35, 256, 66),
    "MXFP4": Layout(39, 32, 17),
    "NVFP4": Layout(40, 64, 36),
}

"""The block types of ggml, as GGUF files hold them: a row is blocks of so many elements and bytes, one after another.

Source: `ggml.h` and `ggml-common.h` of ggml (MIT). A type's number is what files and the library call it.
"""

from typing import NamedTuple


class BlockLayout(NamedTuple):
    """A block type: its number, and the elements and bytes of a block."""

    number: int
    elements: int
    nbytes: int

    def row_bytes(self, columns: int) -> int:
        """Bytes of a row. Raises `ValueError` unless the columns fill whole blocks."""
        if columns % self.elements:
            raise ValueError(f"{columns} columns; expected a multiple of {self.elements}, which one block holds")
        return columns // self.elements * self.nbytes


PLAIN = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}  # types of single numbers
LAYOUTS = {
    "F32": BlockLayout(0, 1, 4),
    "F16": BlockLayout(1, 1, 2),
    "BF16": BlockLayout(30, 1, 2),
    "Q4_0": BlockLayout(2, 32, 18),
    "Q4_1": BlockLayout(3, 32, 20),
    "Q5_0": BlockLayout(6, 32, 22),
    "Q5_1": BlockLayout(7, 32, 24),
    "Q8_0": BlockLayout(8, 32, 34),
    "Q2_K": BlockLayout(10, 256, 84),
    "Q3_K": BlockLayout(11, 256, 110),
    "Q4_K": BlockLayout(12, 256, 144),
    "Q5_K": BlockLayout(13, 256, 176),
    "Q6_K": BlockLayout(14, 256, 210),
    "IQ1_S": BlockLayout(19, 256, 50),
    "IQ1_M": BlockLayout(29, 256, 56),
    "IQ2_XXS": BlockLayout(16, 256, 66),
    "IQ2_XS": BlockLayout(17, 256, 74),
    "IQ2_S": BlockLayout(22, 256, 82),
    "IQ3_XXS": BlockLayout(18, 256, 98),
    "IQ3_S": BlockLayout(21, 256, 110),
    "IQ4_NL": BlockLayout(20, 32, 18),
    "IQ4_XS": BlockLayout(23, 256, 136),
    "TQ1_0": BlockLayout(34, 256, 54),
    "TQ2_0": BlockLayout(35, 256, 66),
    "MXFP4": BlockLayout(39, 32, 17),
    "NVFP4": BlockLayout(40, 64, 36),
}
# the types that vectors are rounded to for a product: no file holds them
ROUNDED = {"Q8_K": BlockLayout(15, 256, 292), "Q8_0": LAYOUTS["Q8_0"], "Q8_1": BlockLayout(9, 32, 36)}

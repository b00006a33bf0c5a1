"""SpQR figure 3.1: one tile of a quantised matrix, its words bit by bit, and what they stand for."""

from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from toolkit.errors import UserError
from toolkit.kernels import csr, spqr
from toolkit.kernels.spqr.layout import Codes, unpack
from toolkit.kernels.spqr.shared import SECOND_ORDER, SPARE, TILE, WEIGHTS, ZERO
from toolkit.models.architectures import ARCHITECTURES
from toolkit.models.shapes import twin_shapes
from toolkit.quantization.spqr import Quantised

WORD_BITS, CODE_BITS, STATISTICS = 64, 3, 4
# the fields of a word: first bit, bits, how many such fields
FIELDS = {
    "scale": (0, CODE_BITS, 1),
    "zero point": (ZERO, CODE_BITS, 1),
    "weights": (WEIGHTS, CODE_BITS, TILE),
    "second-order share": (SECOND_ORDER, 8, 1),
    "unused": (SPARE, WORD_BITS - SPARE, 1),
}
PARTS = "bits a weight, "  # the rows of the table that tell a part of these


@dataclass(frozen=True, eq=False)
class Tile:
    """One tile of a packed matrix: its words, codes and statistics, and the weights, all as the kernels read them."""

    words: np.ndarray  # [16] uint64
    codes: Codes
    original: np.ndarray  # [16, 16], the weight before it was quantised
    dense: np.ndarray  # without outliers
    outliers: np.ndarray  # what is added; 0 where nothing is

    @property
    def decoded(self) -> np.ndarray:
        """The weights that the tile and its outliers stand for."""
        return self.dense + self.outliers

    @property
    def is_outlier(self) -> np.ndarray:
        """Where an outlier is added."""
        return self.outliers != 0

    @property
    def second_order(self) -> np.ndarray:
        """Four fp16 numbers: scale of scales, scale of zeros, zero of scales, zero of zeros."""
        return self.codes.second_order.flatten().numpy()


def tile_at(weight: Tensor, words: Tensor, outliers: csr.Outliers, tall: int, wide: int) -> Tile:
    """Tile (tall, wide) of a matrix, from its packed form. Raises `UserError` for one outside or at a ragged edge."""
    rows, columns = (slice(TILE * at, TILE * (at + 1)) for at in (tall, wide))
    if tall < 0 or wide < 0 or rows.stop > weight.shape[0] or columns.stop > weight.shape[1]:
        raise UserError(f"tile ({tall}, {wide}): expected a whole one inside a matrix of {list(weight.shape)}")
    own = words[tall : tall + 1, wide : wide + 1].contiguous()
    dense = spqr.decode(own, csr.no_outliers((TILE, TILE)))
    added = torch.zeros(weight.shape)
    at_rows, at_columns, values = outliers.entries()
    added[at_rows, at_columns] = values.float()
    original = weight[rows, columns].float()
    parts = (original, dense, added[rows, columns])
    return Tile(own.numpy().view(np.uint64).ravel(), unpack(own, (TILE, TILE)), *(part.numpy() for part in parts))


def busiest_tile(words: Tensor, outliers: csr.Outliers) -> tuple[int, int]:
    """The whole tile with the most outliers, the first of several."""
    tall, wide = (side // TILE for side in outliers.shape)
    rows, columns, _ = outliers.entries()
    whole = (rows < TILE * tall) & (columns < TILE * wide)
    counts = torch.bincount((rows // TILE * wide + columns // TILE)[whole], minlength=tall * wide)
    return divmod(int(counts.argmax()), wide)


def storage_table(matrix: Quantised, model: str) -> pd.DataFrame:
    """What a tile's fields take, and what a weight takes: rows with quantity, value, unit and evidence.

    Sizes of fields are counted in the layout, bits a weight in the real matrix. The bytes that the shares save, against
    a buffer of their own, are those of a whole `model` of the thesis.
    """
    rows, columns = matrix.outliers.shape
    names = {"words": "words", "col_vals": "outliers", "offsets": "offsets", "permutation": "column order"}
    bits = {names[name]: 8 * tensor.nbytes / (rows * columns) for name, tensor in matrix.tensors.items()}
    tiles = sum(np.prod(spqr.tiles(shape)) for shape in twin_shapes(model).values()) * ARCHITECTURES[model].layers
    counted = [(f"bits of {name}", size, "bits") for name, (_, size, _) in FIELDS.items()]
    counted += [
        ("rows of a tile", TILE, "number"),
        ("columns of a tile", TILE, "number"),
        ("bits of a word", WORD_BITS, "bits"),
        ("weights in a word", FIELDS["weights"][2], "number"),
        ("bits left for second-order statistics", WORD_BITS - SECOND_ORDER, "bits"),
        ("bits of second-order statistics", 16 * STATISTICS, "bits"),
        (f"saved in {model}", 2 * STATISTICS * tiles / 1e6, "MB"),
    ]
    measured = [(f"{PARTS}{name}", value, "bits") for name, value in bits.items()]
    measured.append(("bits a weight", sum(bits.values()), "bits"))
    columns = ["quantity", "value", "unit"]
    return pd.concat(
        [
            pd.DataFrame(rows, columns=columns).assign(evidence=evidence)
            for rows, evidence in ((counted, "modelled"), (measured, "measured"))
        ],
        ignore_index=True,
    )


def field_of_bits() -> list[str]:
    """The name of the field that each bit of a word belongs to."""
    fields = [""] * WORD_BITS
    for name, (first, size, count) in FIELDS.items():
        fields[first : first + size * count] = [name] * (size * count)
    return fields


def row_statistics(tile: Tile, row: int) -> tuple[float, float]:
    """Scale and zero point of a row: every step in fp16, as the format asks (thesis, chapter 2)."""
    ss, zs, sz, zz = tile.second_order
    scale = ss * (np.float16(int(tile.codes.scales[row, 0])) - sz)
    zero = zs * (np.float16(int(tile.codes.zeros[row, 0])) - zz)
    return float(scale), float(zero)

"""SpQR figure 3.1: one tile of a quantised matrix, its words bit by bit, and what they stand for."""

from dataclasses import dataclass

import numpy as np
import pandas as pd
import seaborn as sns
import torch
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.colors import Colormap, ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from torch import Tensor

from toolkit.errors import UserError
from toolkit.kernels import csr, spqr
from toolkit.kernels.spqr.layout import Codes, unpack
from toolkit.kernels.spqr.shared import SECOND_ORDER, SPARE, TILE, WEIGHTS, ZERO
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
SECOND_ORDER_NAMES = ("scale of scales", "scale of zeros", "zero of scales", "zero of zeros")
PARTS = "bits a weight, "  # the rows of the table that tell a part of these
BLOCKS = {"llama2-7b": 32}  # decoder blocks of the paper's model


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
        """The four fp16 statistics, in the order of `SECOND_ORDER_NAMES`."""
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
    tiles = sum(np.prod(spqr.tiles(shape)) for shape in twin_shapes(model).values()) * BLOCKS[model]
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


def tile_figure(tile: Tile, row: int) -> Figure:
    """The tile's words bit by bit, its weights before and after, and the arithmetic of one row."""
    figure = plt.figure(figsize=(11, 9), layout="constrained")
    places = figure.subplot_mosaic(
        [["bits"] * 3, ["original", "codes", "decoded"], ["worked"] * 3], height_ratios=[4.1, 3.7, 1.3]
    )
    _draw_bits(places["bits"], tile, row)
    largest = max(np.abs(tile.original).max(), np.abs(tile.decoded).max())
    shades = sns.color_palette("vlag", as_cmap=True)
    for name, values in (("original", tile.original), ("decoded", tile.decoded)):
        _draw_values(places[name], values, shades, largest, tile.is_outlier)
    _draw_values(places["codes"], tile.codes.weights.numpy(), sns.color_palette("Blues", as_cmap=True), None, None)
    for (tall, wide), code in np.ndenumerate(tile.codes.weights.numpy()):
        places["codes"].text(wide, tall, code, ha="center", va="center", fontsize=7, color="w" if code > 4 else "k")
    titles = {"original": "Before (a box: an outlier)", "codes": "Codes q, 3 bits", "decoded": "s · (q − z) + outlier"}
    for name, title in titles.items():
        places[name].set_title(title)
        places[name].add_patch(Rectangle((-0.5, row - 0.5), TILE, 1, fill=False, edgecolor="black", linewidth=1.2))
    _write_row(places["worked"], tile, row)
    return figure


def _field_of_bits() -> list[str]:
    """The name of the field that each bit of a word belongs to."""
    fields = [""] * WORD_BITS
    for name, (first, size, count) in FIELDS.items():
        fields[first : first + size * count] = [name] * (size * count)
    return fields


def _draw_bits(axes: Axes, tile: Tile, row: int) -> None:
    colours = dict(zip(FIELDS, [*sns.color_palette("pastel", 4), (0.9, 0.9, 0.9)], strict=True))
    for bit, name in enumerate(_field_of_bits()):
        place = WORD_BITS - 1 - bit  # the highest bit on the left, as numbers are written
        shade = np.array(colours[name]) * (0.9 if name == "weights" and (bit - WEIGHTS) // CODE_BITS % 2 else 1)
        for number, word in enumerate(tile.words):
            axes.add_patch(Rectangle((place, number), 1, 1, facecolor=shade, edgecolor="white", linewidth=0.4))
            value = int(word) >> bit & 1
            axes.text(place + 0.5, number + 0.5, value, ha="center", va="center", fontsize=6.5, family="monospace")
    axes.add_patch(Rectangle((0, row), WORD_BITS, 1, fill=False, edgecolor="black", linewidth=1.2))
    edges = [0, ZERO, WEIGHTS, 30, SECOND_ORDER, SPARE]
    axes.set_xticks([WORD_BITS - edge - 0.5 for edge in edges], [f"bit {edges[0]}", *edges[1:]])
    axes.set_yticks(np.arange(TILE) + 0.5, [f"row {number}" for number in range(TILE)])
    axes.set(xlim=(0, WORD_BITS), ylim=(TILE, 0), title="Sixteen words of 64 bits: one tile of 16 × 16 weights")
    axes.tick_params(length=0)
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)
    keys = [Patch(color=colour, label=_words(name)) for name, colour in colours.items()]
    axes.legend(handles=keys, loc="upper center", bbox_to_anchor=(0.5, -0.07), ncols=len(keys))


def _words(name: str) -> str:
    _, size, count = FIELDS[name]
    return f"{name}: {count} × {size} bits" if count > 1 else f"{name}: {size} bits"


def _draw_values(
    axes: Axes, values: np.ndarray, shades: Colormap | ListedColormap, largest: float | None, boxed: np.ndarray | None
) -> None:
    ends = {} if largest is None else {"vmin": -largest, "vmax": largest}
    picture = axes.imshow(values, cmap=shades, **ends)
    axes.figure.colorbar(picture, ax=axes, shrink=0.8)
    if boxed is not None:
        for tall, wide in np.argwhere(boxed):
            style = {"fill": False, "edgecolor": "black", "linewidth": 1.6}
            axes.add_patch(Rectangle((wide - 0.5, tall - 0.5), 1, 1, **style))
    axes.set_xticks([0, 5, 10, 15])
    axes.set_yticks([0, 5, 10, 15])
    axes.grid(visible=False)


def _write_row(axes: Axes, tile: Tile, row: int) -> None:
    """The arithmetic of one row, with its numbers."""
    ss, zs, sz, zz = (float(number) for number in tile.second_order)
    scale_code, zero_code = int(tile.codes.scales[row, 0]), int(tile.codes.zeros[row, 0])
    scale, zero = row_statistics(tile, row)
    column = int(np.argmax(tile.is_outlier[row])) if tile.is_outlier[row].any() else 0
    code, added = int(tile.codes.weights[row, column]), float(tile.outliers[row, column])
    shares = " ".join(f"{int(word) >> SECOND_ORDER & 255:02x}" for word in tile.words[::2])
    lines = [
        f"Second order, once a tile: the shares of rows 0, 2, 4 to 14 are the bytes {shares}, four fp16 numbers:",
        f"    scale of scales {_signed(ss)}      scale of zeros {_signed(zs)}      zero of scales {_signed(sz)}      "
        f"zero of zeros {_signed(zz)}",
        f"First order, row {row}:    s = {_signed(ss)} · ({scale_code} − {_inner(sz)}) = {_signed(scale)}        "
        f"z = {_inner(zs)} · ({zero_code} − {_inner(zz)}) = {_signed(zero)}",
        f"Weight, row {row}, column {column}:    s · (q − z) = {_inner(scale)} · ({code} − {_inner(zero)}) = "
        f"{_signed(tile.dense[row, column])}"
        + (f";   with the outlier {_signed(added)}: {_signed(tile.decoded[row, column])}" if added else "")
        + f"        (before: {_signed(tile.original[row, column])})",
    ]
    axes.axis("off")
    for number, line in enumerate(lines):
        axes.text(0, 0.95 - 0.26 * number, line, fontsize=9.5, va="top", transform=axes.transAxes)


def _signed(value: float) -> str:
    """Four digits and a minus that is one."""
    return f"{float(value):.4g}".replace("-", "−")


def _inner(value: float) -> str:
    """The same, in brackets where it is negative."""
    return f"({_signed(value)})" if value < 0 else _signed(value)


def row_statistics(tile: Tile, row: int) -> tuple[float, float]:
    """Scale and zero point of a row: every step in fp16, as the format asks (thesis, chapter 2)."""
    ss, zs, sz, zz = tile.second_order
    scale = ss * (np.float16(int(tile.codes.scales[row, 0])) - sz)
    zero = zs * (np.float16(int(tile.codes.zeros[row, 0])) - zz)
    return float(scale), float(zero)


def tile_sentence(table: pd.DataFrame, tile: Tile, place: str) -> str:
    """What a weight takes, and how near the tile comes to the weights before."""
    value = table.set_index("quantity")["value"]
    error = np.abs(tile.decoded - tile.original)
    step = np.mean([row_statistics(tile, row)[0] for row in range(TILE)])
    without = np.abs(tile.dense - tile.original)[tile.is_outlier]
    kept = (
        f"its {len(without)} outliers would be off by {without.max():.3f} at most without their fp16 numbers"
        if len(without)
        else "it has no outliers"
    )
    parts = [f"{value[name]:.2f} for {name.removeprefix(PARTS)}" for name in value.index if name.startswith(PARTS)]
    return (
        f"a 3-bit weight takes {value['bits a weight']:.2f} bits: {', '.join(parts)} "
        f"({place}, measured). In the tile shown the mean step is {step:.4f} and the mean error {error.mean():.4f}; "
        f"{kept}. Second-order statistics in spare bits save {value['saved in llama2-7b']:.0f} MB in Llama 2 7B."
    )

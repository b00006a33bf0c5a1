"""SpQR figure 3.4: the outliers of a quantised model in CSR and in PTCSR, their bytes and their padding."""

from collections.abc import Iterable, Mapping

import numpy as np
import pandas as pd
import seaborn as sns
import torch
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import MaxNLocator

from toolkit.kernels import csr
from toolkit.kernels.csr.layout import word_dtype
from toolkit.kernels.csr.shared import BLOCK
from toolkit.measure.products import Twin
from toolkit.models.shapes import twin_shapes
from toolkit.papers.spqr_density import row_counts
from toolkit.papers.spqr_tile import BLOCKS

EVEN, AS_QUANTISED = "even", "as quantised"


def storage_sizes(matrices: Iterable[tuple[int, str, csr.Outliers]]) -> pd.DataFrame:
    """Bytes of each matrix's outliers in both storages: a row a matrix and storage.

    Columns: layer, op, storage, weights, offset_bytes, outlier_bytes, padding_bytes, nbytes, bits_per_weight,
    padding_percent (of the outliers' own bytes).
    """
    rows = []
    for layer, op, outliers in matrices:
        entries = outliers.entries()
        for storage in csr.STORAGES:
            stored = csr.encode(storage, outliers.shape, *entries)
            rows.append({"layer": layer, "op": op, "storage": storage, **_sizes(stored, len(entries[0]))})
    return pd.DataFrame(rows)


def _sizes(stored: csr.Outliers, count: int) -> dict[str, float]:
    weights = stored.shape[0] * stored.shape[1]
    own = stored.col_vals.itemsize * count
    padding, nbytes = stored.col_vals.nbytes - own, stored.offsets.nbytes + stored.col_vals.nbytes
    return {
        "weights": weights,
        "offset_bytes": stored.offsets.nbytes,
        "outlier_bytes": own,
        "padding_bytes": padding,
        "nbytes": nbytes,
        "bits_per_weight": 8 * nbytes / weights,
        "padding_percent": 100 * padding / own if own else 0.0,
    }


def model_padding(densities: Iterable[Mapping[str, list[int]]], model: str, outliers: float) -> pd.DataFrame:
    """What PTCSR's padding takes in a whole model of other shapes: a row an operation and spread of outliers.

    `densities` are those of each block of a quantised model (`densities_by_layer`); every block of `model`, of as many
    as the thesis counts, stands for one of them in turn. `spread` is `EVEN`, all rows alike but for chance, or
    `AS_QUANTISED`. Columns: op, spread, csr_mb, ptcsr_mb, padding_mb.
    """
    densities, generator, rows = list(densities), np.random.default_rng(0), []
    for op, shape in twin_shapes(model).items():
        for name in (EVEN, AS_QUANTISED):
            sizes = np.zeros(2)
            for block in range(BLOCKS[model]):
                density = tuple(densities[block % len(densities)][op]) if name == AS_QUANTISED else None
                sizes += _words(Twin(shape, outliers, density).row_counts(generator))
            csr_mb, ptcsr_mb = 4 * sizes / 1e6
            rows.append((op, name, csr_mb, ptcsr_mb, ptcsr_mb - csr_mb))
    return pd.DataFrame(rows, columns=["op", "spread", "csr_mb", "ptcsr_mb", "padding_mb"])


def _words(counts: np.ndarray) -> tuple[int, int]:
    """Words and offsets, 32 bits each, in CSR and in PTCSR."""
    blocks = np.resize(np.append(counts, np.zeros(-len(counts) % BLOCK, int)), (-(-len(counts) // BLOCK), BLOCK))
    return int(counts.sum()) + len(counts) + 1, int(BLOCK * blocks.max(axis=1).sum()) + len(blocks) + 1


def storage_summary(sizes: pd.DataFrame, padding: pd.DataFrame) -> pd.DataFrame:
    """The numbers that the thesis speaks of: rows with quantity, value, unit and evidence."""
    whole = sizes.groupby("storage")[["offset_bytes", "padding_bytes", "outlier_bytes"]].sum()
    total = padding.groupby("spread")["padding_mb"].sum()
    offsets = whole.loc["csr", "offset_bytes"] / whole.loc["ptcsr", "offset_bytes"]
    share = 100 * whole.loc["ptcsr", "padding_bytes"] / whole.loc["ptcsr", "outlier_bytes"]
    rows = [
        ("offsets, CSR over PTCSR", offsets, "ratio", "measured"),
        ("padding over outliers", share, "percent", "measured"),
        ("bits of an offset", 8 * torch.int32.itemsize, "bits", "modelled"),
        ("bits of an outlier", 8 * word_dtype(1).itemsize, "bits", "modelled"),
        *((f"padding of the whole model, {spread}", value, "MB", "modelled") for spread, value in total.items()),
    ]
    return pd.DataFrame(rows, columns=["quantity", "value", "unit", "evidence"])


def storage_figure(outliers: csr.Outliers, block: int, sizes: pd.DataFrame) -> Figure:
    """Sixteen rows of a real matrix in both layouts, cell by cell; then bytes by operation and padding by layer."""
    figure = plt.figure(figsize=(11, 8.6), layout="constrained")
    places = figure.subplot_mosaic([["matrix", "csr", "ptcsr"], ["bytes", "bytes", "padding"]], height_ratios=[5, 3.6])
    rows = _block_rows(outliers, block)
    _draw_matrix(places["matrix"], rows, outliers.shape[1], block)
    _draw_csr(places["csr"], rows)
    _draw_ptcsr(places["ptcsr"], rows)
    _draw_bytes(places["bytes"], sizes)
    _draw_padding(places["padding"], sizes)
    return figure


def typical_block(outliers: csr.Outliers) -> int:
    """The block of 16 rows whose padding is the median of the matrix, the first of several."""
    counts = row_counts(outliers)
    whole = counts[: len(counts) // BLOCK * BLOCK].reshape(-1, BLOCK)
    padding = BLOCK * whole.max(axis=1) - whole.sum(axis=1)
    return int(np.argsort(padding, kind="stable")[(len(padding) - 1) // 2])


def _block_rows(outliers: csr.Outliers, block: int) -> list[np.ndarray]:
    """The columns of the outliers in each row of a block."""
    rows, columns, _ = (part.numpy() for part in outliers.entries())
    return [columns[rows == row] for row in range(BLOCK * block, BLOCK * (block + 1))]


def _draw_matrix(axes: Axes, rows: list[np.ndarray], columns: int, block: int) -> None:
    for row, places in enumerate(rows):
        axes.plot(places, np.full(len(places), row), "s", color=_colour(row), markersize=4)
    axes.set(xlim=(-columns / 40, columns), ylim=(BLOCK - 0.5, -0.5), xlabel="column", ylabel=f"row − {BLOCK * block}")
    axes.set(title=f"Outliers of rows {BLOCK * block} to {BLOCK * block + BLOCK - 1}")
    axes.set_yticks(range(0, BLOCK, 5))


def _draw_csr(axes: Axes, rows: list[np.ndarray]) -> None:
    """Words in the order of memory, sixteen a line; the number in a cell is the outlier's row."""
    order = [row for row, places in enumerate(rows) for _ in places]
    for at, row in enumerate(order):
        _cell(axes, at % BLOCK, at // BLOCK, _colour(row), str(row))
    _frame(axes, -(-len(order) // BLOCK), rows, f"CSR: {len(order)} words, {BLOCK + 1} offsets")


def _draw_ptcsr(axes: Axes, rows: list[np.ndarray]) -> None:
    """A column is a row of the matrix: word k of row r is number 16·k + r."""
    longest = max(map(len, rows))
    for row, places in enumerate(rows):
        for k in range(longest):
            if k < len(places):
                _cell(axes, row, k, _colour(row), str(row))
            else:
                _cell(axes, row, k, "white", "0", edge="0.8", ink="0.6")
    _frame(axes, longest, rows, f"PTCSR: {BLOCK * longest} words, 2 offsets")


def _colour(row: int) -> tuple[float, float, float]:
    return sns.color_palette("husl", BLOCK)[row]


def _cell(axes: Axes, x: int, y: int, colour, text: str, edge: str = "white", ink: str = "black") -> None:
    axes.add_patch(Rectangle((x, y), 1, 1, facecolor=colour, edgecolor=edge, linewidth=0.6))
    axes.text(x + 0.5, y + 0.5, text, ha="center", va="center", fontsize=7, color=ink)


def _frame(axes: Axes, lines: int, rows: list[np.ndarray], title: str) -> None:
    tallest = max(max(map(len, rows)), -(-sum(map(len, rows)) // BLOCK), lines)
    axes.set(xlim=(0, BLOCK), ylim=(tallest, 0), title=title, xlabel="16 words a line, in the order of memory")
    axes.set_xticks([])
    axes.set_yticks(np.arange(0, tallest, 4) + 0.5, [f"+{BLOCK * line}" for line in range(0, tallest, 4)])
    axes.tick_params(length=0)
    axes.grid(visible=False)


PARTS = {"outlier_bytes": "outliers", "padding_bytes": "padding", "offset_bytes": "offsets"}


def _draw_bytes(axes: Axes, sizes: pd.DataFrame) -> None:
    """Bits a weight of what outliers take, by operation and storage, in their parts."""
    whole = sizes.groupby(["op", "storage"], sort=False)[["weights", *PARTS]].sum()
    bits = 8 * whole[list(PARTS)].div(whole["weights"], axis=0)
    ops = list(dict.fromkeys(sizes["op"]))
    for number, storage in enumerate(csr.STORAGES):
        left = np.zeros(len(ops))
        places = np.arange(len(ops)) + 0.4 * number - 0.2
        for colour, part in zip(("C0", "0.8", "C3"), PARTS, strict=True):
            values = bits.xs(storage, level="storage").loc[ops, part].to_numpy()
            axes.bar(places, values, 0.36, bottom=left, color=colour, hatch="" if storage == "csr" else "..")
            left += values
    axes.set_xticks(range(len(ops)), ops)
    axes.set(ylabel="bits per weight", title="What outliers take, over all layers (plain: CSR, dotted: PTCSR)")
    keys = [Patch(color=colour, label=label) for colour, label in zip(("C0", "0.8", "C3"), PARTS.values(), strict=True)]
    axes.legend(handles=keys, loc="upper left", ncols=3)
    axes.set_ylim(0, 1.25 * axes.get_ylim()[1])


def _draw_padding(axes: Axes, sizes: pd.DataFrame) -> None:
    padded = sizes[sizes["storage"] == "ptcsr"]
    sns.lineplot(padded, x="layer", y="padding_percent", hue="op", style="op", ax=axes)
    axes.set(ylabel="% of the outliers' bytes", title="PTCSR's padding", ylim=(0, None))
    axes.legend(title=None, fontsize=7, ncols=2, loc="upper center")
    axes.set_ylim(0, 1.45 * axes.get_ylim()[1])
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def storage_sentence(sizes: pd.DataFrame, summary: pd.DataFrame, model: str) -> str:
    """What PTCSR saves and what it pays."""
    value = summary.set_index("quantity")["value"]
    whole = sizes.groupby("storage")[["nbytes", "weights", "offset_bytes", "padding_bytes"]].sum()
    bits = 8 * whole["nbytes"] / whole["weights"]
    saved = whole.loc["csr", "offset_bytes"] - whole.loc["ptcsr", "offset_bytes"]
    by_op = sizes[sizes["storage"] == "ptcsr"].groupby("op")["padding_percent"].mean()
    padding = {spread: value[f"padding of the whole model, {spread}"] for spread in (EVEN, AS_QUANTISED)}
    return (
        f"PTCSR's offsets take {value['offsets, CSR over PTCSR']:.1f} times fewer bytes, which saves {saved / 1e6:.2f} "
        f"MB; its padding adds {whole.loc['ptcsr', 'padding_bytes'] / 1e6:.2f} MB, "
        f"{value['padding over outliers']:.0f} % of the outliers' own bytes ({by_op.min():.0f} % in {by_op.idxmin()}, "
        f"{by_op.max():.0f} % in {by_op.idxmax()}). Outliers take {bits['csr']:.2f} bits a weight in CSR and "
        f"{bits['ptcsr']:.2f} in PTCSR (measured). In {model} padding would take {padding[EVEN]:.0f} MB with outliers "
        f"spread evenly, {padding[AS_QUANTISED]:.0f} MB spread as here (modelled)."
    )

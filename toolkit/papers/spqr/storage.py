"""SpQR figure 3.4: the outliers of a quantised model in CSR and in PTCSR, their bytes and their padding."""

from collections.abc import Iterable, Mapping

import numpy as np
import pandas as pd
import torch

from toolkit.kernels import csr
from toolkit.kernels.csr.layout import word_dtype
from toolkit.kernels.csr.shared import BLOCK
from toolkit.measure.products import MatrixTwin
from toolkit.models.architectures import ARCHITECTURES
from toolkit.models.shapes import twin_shapes
from toolkit.quantization.outliers import row_counts

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
            for block in range(ARCHITECTURES[model].layers):
                density = tuple(densities[block % len(densities)][op]) if name == AS_QUANTISED else None
                sizes += _words(MatrixTwin(shape, outliers, density).row_counts(generator))
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


def typical_block(outliers: csr.Outliers) -> int:
    """The block of 16 rows whose padding is the median of the matrix, the first of several."""
    counts = row_counts(outliers)
    whole = counts[: len(counts) // BLOCK * BLOCK].reshape(-1, BLOCK)
    padding = BLOCK * whole.max(axis=1) - whole.sum(axis=1)
    return int(np.argsort(padding, kind="stable")[(len(padding) - 1) // 2])

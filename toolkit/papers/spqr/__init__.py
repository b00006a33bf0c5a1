"""SpQR's inference kernel: 3-bit weights in tiles, outliers in CSR or PTCSR, decoded by table within the mat-vec.

The idea: one token's mat-vec is bound by the bytes of the weights. Sixteen 3-bit weights and their share of the scales
fill one 64-bit word; the few weights that lose most by rounding are kept apart in 16 bits, as a sparse matrix.

Begin with `notebooks/spqr/fig3_1_tile_storage`, then `fig4_1_kernel_speedup`. The quantiser, the format and the kernels
are the engine's (`toolkit.quantization.spqr`, `toolkit.formats.spqr`, `toolkit.kernels.spqr`).

- `products`: mat-vecs in turns, SpQR's ways beside other formats
- `speedups`: figures 3.2, 4.1 and 4.2: measured speed-ups, their byte limits, and a cost model of the thesis' GPUs
- `forward_pass`: figure 4.3: whole forward passes, and twins beside llama.cpp
"""

from typing import TYPE_CHECKING

from toolkit.lazy import lazy

if TYPE_CHECKING:
    from toolkit.papers.spqr.forward_pass import ModelTwin, forward_measurements, twin_measurements
    from toolkit.papers.spqr.products import FEW, MANY, READ, MatrixTwin, product_measurements, random_outliers
    from toolkit.papers.spqr.speedups import (
        CSR,
        DENSE_BITS,
        MEAN,
        NAMES,
        OURS,
        PTCSR,
        QUICKER,
        STORAGES,
        WORD_WEIGHTS,
        by_op,
        draw_bars,
        mean_row,
        measured_speedups,
        modelled_speedups,
        product_s,
        stored_bits,
        without_kernels,
    )
else:
    __getattr__, __dir__ = lazy(__name__)

__all__ = [
    "CSR",
    "DENSE_BITS",
    "FEW",
    "MANY",
    "MEAN",
    "NAMES",
    "OURS",
    "PTCSR",
    "QUICKER",
    "READ",
    "STORAGES",
    "WORD_WEIGHTS",
    "MatrixTwin",
    "ModelTwin",
    "by_op",
    "draw_bars",
    "forward_measurements",
    "mean_row",
    "measured_speedups",
    "modelled_speedups",
    "product_measurements",
    "product_s",
    "random_outliers",
    "stored_bits",
    "twin_measurements",
    "without_kernels",
]

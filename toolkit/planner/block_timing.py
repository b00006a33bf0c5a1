"""The measurement behind the rate of a type of blocks of GGUF files. It needs kernels alone, and no runtime."""

from math import nan
from statistics import median
from time import perf_counter

import pandas as pd
import torch

from toolkit.formats.twins import random_blocks
from toolkit.kernels.blocks import LAYOUTS

NBYTES, COLUMNS, TIMED_S = 1 << 26, 4096, 0.25  # more bytes than caches hold


def of_blocks(kind: str) -> pd.DataFrame:
    """The time of products with blocks of a type, as `block_times` has it. Raises `KeyError` for an unknown type."""
    matrix, x = random_blocks(kind, NBYTES // LAYOUTS[kind].row_bytes(COLUMNS), COLUMNS), torch.ones(COLUMNS)
    matrix.matvec(x)  # compiles
    seconds: list[float] = []
    while sum(seconds) < TIMED_S:
        start = perf_counter()
        matrix.matvec(x)
        seconds.append(perf_counter() - start)
    return pd.DataFrame([{"method": kind, "nbytes": matrix.nbytes, "seconds": median(seconds), "disturbed": nan}])

"""Rows of a matrix copied to other rows of it, without a copy in between."""

import numpy as np
from jaxtyping import Int64, UInt8

from toolkit.kernels.engine.compiled import compiled


@compiled
def _move(matrix, sources, targets):
    for number in range(len(sources)):
        matrix[targets[number]] = matrix[sources[number]]


def move_rows(
    matrix: UInt8[np.ndarray, "rows bytes"], sources: Int64[np.ndarray, " moved"], targets: Int64[np.ndarray, " moved"]
) -> None:
    """Copy row `sources[i]` to row `targets[i]`, for all i. No row is both a source and a target."""
    _move(matrix, np.ascontiguousarray(sources), np.ascontiguousarray(targets))

"""Least squares with coefficients that are not below zero, for times that are sums of a few parts."""

import numpy as np
from jaxtyping import Float
from scipy.optimize import nnls


def non_negative(terms: Float[np.ndarray, "rows terms"], target: Float[np.ndarray, " rows"]) -> list[float]:
    """The coefficients with the least sum of squares of `terms @ coefficients - target`, none below zero."""
    scale = np.linalg.norm(terms, axis=0)
    scale[scale == 0] = 1  # columns of one size: SciPy's tolerance is one number for all
    return (nnls(terms / scale, target)[0] / scale).tolist()

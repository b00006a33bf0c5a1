"""Least squares with coefficients that are not below zero, for times that are sums of a few parts."""

from itertools import product

import numpy as np
from jaxtyping import Float


def non_negative(terms: Float[np.ndarray, "rows terms"], target: Float[np.ndarray, " rows"]) -> list[float]:
    """The coefficients with the least sum of squares of `terms @ coefficients - target`, none below zero.

    In the best solution some terms are zero and the others are those of plain least squares, so each choice of terms is
    tried: there are few.
    """
    scale = np.linalg.norm(terms, axis=0)
    scale[scale == 0] = 1  # else a small term would count as none
    best, least = np.zeros(terms.shape[1]), np.inf
    for chosen in product((False, True), repeat=terms.shape[1]):
        found = np.zeros(terms.shape[1])
        found[[*chosen]] = np.linalg.lstsq((terms / scale)[:, chosen], target, rcond=None)[0]
        error = np.square(terms / scale @ found - target).sum()
        if error < least and (found >= 0).all():
            best, least = found, error
    return (best / scale).tolist()

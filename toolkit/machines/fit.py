"""Least squares with coefficients that are not below zero, for times that are sums of a few parts."""

from itertools import product

import numpy as np
from jaxtyping import Float


def non_negative(terms: Float[np.ndarray, "rows terms"], target: Float[np.ndarray, " rows"]) -> list[float]:
    """The coefficients with the least sum of squares of `terms @ coefficients - target`, none below zero.

    The optimum has some coefficients at zero and is plain least squares in the others, so all choices are tried: good
    for a few terms.
    """
    best, least = np.zeros(terms.shape[1]), float((target**2).sum())
    for used in product([False, True], repeat=terms.shape[1]):
        chosen, found = np.flatnonzero(used), np.zeros(terms.shape[1])
        found[chosen] = np.linalg.lstsq(terms[:, chosen], target, rcond=None)[0]
        squares = float(((terms @ found - target) ** 2).sum())
        if found.min() >= 0 and squares < least:
            best, least = found, squares
    return best.tolist()

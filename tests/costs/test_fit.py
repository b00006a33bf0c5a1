"""Least squares without negative coefficients, beside a search on a grid."""

from itertools import product

import numpy as np

from toolkit.costs.fit import non_negative


def test_no_point_of_a_grid_is_better():
    for seed in range(20):
        rng = np.random.default_rng(seed)
        terms, target = rng.random((5, 2)), rng.standard_normal(5)
        found = np.array(non_negative(terms, target))
        assert found.min() >= 0
        squares = ((terms @ found - target) ** 2).sum()
        grid = product(np.linspace(0, 3, 61), repeat=2)
        assert squares <= min(((terms @ tried - target) ** 2).sum() for tried in grid) + 1e-12

"""Experts that are used least take fewer bits."""

import numpy as np

from toolkit.policies.expert_bits import bits_by_usage


def test_by_hand():
    """Of four experts the two used least; of two used alike the first."""
    usage = [np.array([0.1, 0.9, 0.0, 0.1]), np.array([0.5, 0.5, 0.5, 0.5])]
    assert bits_by_usage(usage, 0.5) == [[2, 4, 2, 4], [2, 2, 4, 4]]
    assert bits_by_usage(usage, 0.0, bits=16) == [[16] * 4] * 2
    assert bits_by_usage(usage, 1.0) == [[2] * 4] * 2

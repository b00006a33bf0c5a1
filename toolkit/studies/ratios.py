"""Differences of log-perplexity as ratios of perplexities.

Kept results do not depend on this module: it changes how they are shown.
"""

import numpy as np


def ratio_range(difference: float, error: float, name: str = "relative") -> dict[str, float]:
    """The ratio of two perplexities, and its range by one standard error.

    `difference` is of their logarithms, nats a token, `error` its standard error, as `paired_difference` gives them.
    An error of nan gives ends of nan. Keys: the name, and the name with `_low` and `_high`.
    """
    low, middle, high = np.exp([difference - error, difference, difference + error]).tolist()
    return {name: middle, f"{name}_low": low, f"{name}_high": high}

"""Times of small decoders tell what a large one takes."""

from itertools import product

import pandas as pd

from tests.planner.test_neurons import times_are
from toolkit.planner import rates


def test_times_that_are_off_by_a_twentieth_foretell_a_large_model_within_a_tenth(monkeypatch):
    """A token takes 1 ms, 0.2 ms a layer, and its bytes at 20 GB/s; the large one has 28 layers and 3 GB.

    A second of reads takes a quarter of a second from products beside it.
    """
    rows = [(layers, 2 * (4 * hidden**2 + 3 * hidden * ffn)) for hidden, ffn, layers in rates.SIZES]
    table = pd.DataFrame(rows, columns=["layers", "nbytes"]).assign(
        method="dense_packed", dtype="bfloat16", disturbed=0.0
    )
    true_s = 1e-3 + 2e-4 * table["layers"] + table["layers"] * table["nbytes"] / 20e9
    for signs in product((-0.05, 0.05), repeat=len(rows)):
        tokens = table.assign(stage="token", seconds=true_s * (1 + pd.Series(signs)))
        reads = table.assign(stage="read", seconds=table["nbytes"] / 2e9)
        lost_s = 0.25 * (table["layers"] // rates.ONE_READ_IN) * reads["seconds"]
        partly = tokens.assign(stage="partly", seconds=tokens["seconds"] + lost_s)[lost_s > 0]
        every = pd.concat([tokens, reads, partly])
        times_are(monkeypatch, layer_times=every)
        found = rates.rates()
        foretold = found.token["dense_packed", "bfloat16"].seconds(28, 3e9)
        assert abs(foretold / (1e-3 + 28 * 2e-4 + 3 / 20) - 1) < 0.1, signs
        assert abs(found.slowdown - 0.25) < 1e-9

"""Hermes's figure 8, by its notebook: placements, imbalances and prices by hand."""

import numpy as np
import pytest

from tests.notebook_code import functions_of

fig08 = functions_of("hermes/fig08")
PROMPT, PLACEMENTS = fig08.PROMPT, fig08.PLACEMENTS

# two groups of neurons that fire in turn, one in each half of ten: 0 to 4 and 5 to 9; 10 and 11 always fire
TOKENS = np.zeros((PROMPT + 40, 12), dtype=bool)
TOKENS[::2, :5] = TOKENS[1::2, 5:10] = TOKENS[:, 10:] = True


def test_hot_neurons_are_the_most_used():
    assert np.flatnonzero(fig08.hot_neurons(TOKENS[:PROMPT])).tolist() == [10, 11]
    assert fig08.changed_hot(TOKENS) == 0
    later = TOKENS.copy()
    later[PROMPT:, 10] = False
    later[40:, 0] = True  # neuron 0 takes the place of neuron 10
    assert fig08.changed_hot(later) == 0.5


def test_every_placement_fills_the_dimms_evenly():
    for place in PLACEMENTS.values():
        assert np.bincount(place(TOKENS[:PROMPT], 4)).tolist() == [3, 3, 3, 3]


def test_clusters_put_neurons_together_that_fire_together():
    dimm = PLACEMENTS["clustered"](TOKENS[:PROMPT, :10], 2)
    assert len(set(dimm[:5])) == len(set(dimm[5:])) == 1
    assert dimm[0] != dimm[5]


def test_imbalance_by_hand():
    """On two DIMMs each group has one to itself: a token finds all its neurons on one of them."""
    table = fig08.imbalance_table([TOKENS], 2, [0, 4]).set_index(["placement", "window"])
    fixed = table.loc[("clustered", 0)]
    assert fixed["imbalance"] > 1.6
    assert np.isnan(fixed["moved"])
    assert (table.xs(4, level="window")["imbalance_after"] <= table.xs(4, level="window")["imbalance_before"]).all()


def test_migration_by_hand():
    """1,000 neurons of 25 MB: four pairs move 6.25 GB each, in 0.25 s; the host moves 50 GB."""
    found = fig08.migration(1000, layers=1, neuron_bytes=25_000_000, window=5, tokens_s=10, dimms=8).set_index(
        "through"
    )
    assert found.loc["DIMM-link", "seconds"] == pytest.approx(0.25)
    assert found.loc["DIMM-link", "time_percent"] == pytest.approx(100 * 0.25 / 0.75)
    assert found.loc["host", "seconds"] == pytest.approx(50 / 25.6)
    assert found["slower"].tolist() == pytest.approx([1, 50 / 25.6 / 0.25, 62])

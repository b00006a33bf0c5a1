"""Statistics of traces against slow counts with sets."""

import pytest
import torch

from tests import naive_activations as naive
from tests.notebook_code import functions_of
from toolkit.sparsity import statistics
from toolkit.sparsity.trace import Trace, pack

# one sequence of three tokens, four neurons
ACTIVE = torch.tensor([[[1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 0]]], dtype=torch.bool)


@pytest.fixture
def worked():
    return Trace("tiny", "worked", torch.zeros(1, 3, dtype=torch.int32), (4,), (pack(ACTIVE),))


def test_by_hand(worked):
    row = statistics.sparsity(worked).iloc[0]
    assert (row.sparsity, row.active, row.fewest, row.most, row.never) == (0.5, 2, 2, 2, 0.25)
    usage = statistics.aggregated_usage(worked, 3)
    assert usage["used"].tolist() == [0.5, (0.75 + 0.5) / 2, 0.75]
    assert usage["most"].tolist() == [0.5, 0.75, 0.75]
    assert usage["new"].tolist() == [0.5, 0.125, 0.125]
    near, far = statistics.overlap(worked, [1, 2]).itertuples()
    assert (near.shared, near.jaccard) == (3 / 4, 3 / 5)
    assert (far.shared, far.jaccard) == (1 / 2, 1 / 3)
    assert near.chance == pytest.approx((1 + 1 / 9 + 4 / 9) / 2)
    curve = functions_of("hermes/fig03").hot_cold(worked, 4)
    assert curve["neurons"].tolist() == [0.25, 0.5, 0.75, 1]
    assert curve["activations"].tolist() == pytest.approx([3 / 6, 5 / 6, 1, 1])
    closest = functions_of("flash/fig12").friends(worked, 0, [1])
    assert closest["neuron"].tolist() == [0, 1, 2]
    assert closest["friend"].tolist() == [2, 0, 0]
    assert closest["together"].tolist() == pytest.approx([2 / 3, 1, 1])
    assert closest["usage"].tolist() == pytest.approx([2 / 3, 1, 1])


def test_against_sets(trace):
    found = trace(neurons=(13, 70), sequences=3, length=8)
    usage, overlap = statistics.aggregated_usage(found, 8), statistics.overlap(found, [1, 3, 7])
    for layer, neurons in enumerate(found.units):
        active = found.active(layer).tolist()
        for row in usage[usage["layer"] == layer].itertuples():
            assert (row.used, row.most) == pytest.approx(naive.used(active, row.tokens, neurons))
        for row in overlap[overlap["layer"] == layer].itertuples():
            assert (row.shared, row.jaccard) == pytest.approx(naive.shared(active, row.distance))
        pairs = functions_of("flash/fig12").coactivation(found, layer)
        expected = [[naive.together(active, i, j) for j in range(neurons)] for i in range(neurons)]
        torch.testing.assert_close(pairs, torch.tensor(expected))

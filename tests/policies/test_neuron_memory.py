"""Rows of memory shared among layers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolkit.errors import UserError
from toolkit.policies.neuron_memory import Shares


def test_worked_examples():
    assert Shares.of(30, [2, 4], [10, 20], 5) == Shares((10, 20), 0)  # all fits
    assert Shares.of(18, [2, 4], [10, 20], 5) == Shares((6, 12), 0)  # by the needs
    assert Shares.of(25, [4, 4], [10, 20], 5) == Shares((10, 15), 0)  # the first can have no more
    assert Shares.of(20, [10, 4, 10], [10, 20, 10], 5) == Shares((10, 5, 0), 5)  # the first whole layer stays
    assert Shares.of(12, [10, 4], [10, 20], 5) == Shares((0, 7), 5)
    assert Shares.keeping_nothing(7, [10, 20]) == Shares((0, 0), 7)
    assert Shares.keeping_nothing(70, [10, 20]) == Shares((0, 0), 20)
    with pytest.raises(UserError, match="5 neurons fit into memory, and one token needs 6"):
        Shares.of(5, [2, 4], [10, 20], 5)


@given(
    layers=st.lists(st.tuples(st.integers(0, 30), st.integers(1, 30)), min_size=1, max_size=6),
    more=st.integers(0, 200),
    passing=st.integers(1, 8),
)
def test_rows_are_never_too_many_and_needs_are_met(layers, more, passing):
    needs, neurons = zip(*((min(need, count), count) for need, count in layers), strict=True)
    rows = Shares.least(needs, neurons, passing) + more
    found = Shares.of(rows, needs, neurons, passing)
    assert sum(found.rows) + found.passing <= rows
    for share, need, count in zip(found.rows, needs, neurons, strict=True):
        assert need <= share <= count or (need == count and share == 0 and found.passing)

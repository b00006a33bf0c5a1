import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolkit.costs.curve import Curve

points = st.dictionaries(st.integers(1, 10**9), st.floats(1e-6, 10.0), min_size=1, max_size=8)


def test_between_below_and_beyond_the_sizes_by_hand():
    curve = Curve.through([4, 1, 2], [3.0, 1.0, 2.0])
    assert curve == Curve((1, 2, 4), (1, 2, 3))
    assert [curve.at(n) for n in (0.5, 1, 1.5, 2, 3, 4)] == pytest.approx([1, 1, 1.5, 2, 2.5, 3])
    assert curve.at(8) == pytest.approx(6)  # at the rate of the largest


def test_a_slow_spell_is_cut_to_the_time_of_a_larger_size():
    assert Curve.through([1, 2, 4, 8], [1.0, 9.0, 3.0, 5.0]).seconds == (1, 3, 3, 5)


@given(points, st.floats(0, 2e9), st.floats(0, 2e9))
def test_more_bytes_never_take_less_time(sizes, few, many):
    curve = Curve.through(list(sizes), list(sizes.values()))
    few, many = sorted((few, many))
    assert 0 < curve.at(few) <= curve.at(many) * (1 + 1e-12)

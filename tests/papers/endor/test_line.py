import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.naive_cost_model import relative_errors
from toolkit.papers.endor.rates import fit_line


def test_a_line_by_hand():
    line = fit_line([1e6, 10e6, 100e6], [0.0006, 0.0051, 0.0501])  # 0.1 ms, and 2 GB/s
    assert (line.fixed_s, line.gb_s) == pytest.approx((1e-4, 2.0))
    assert line.seconds(4e6) == pytest.approx(0.0021)


def test_a_slow_spell_of_one_size_moves_nothing():
    sizes = np.array([1e6, 4e6, 16e6, 64e6, 256e6])
    times = 2e-4 + sizes / 1e9
    times[4] *= 1.5
    assert fit_line(sizes, times).seconds(16e6) == pytest.approx(0.0162)


def test_no_fixed_time_is_below_zero():
    assert fit_line([1e6, 2e6, 4e6], [0.0009, 0.002, 0.0041]).fixed_s == 0
    assert fit_line([1e6, 2e6], [3.0, 2.0]).fixed_s == 0  # smaller ones taking longer says nothing of what is fixed


rising = st.lists(st.integers(1, 50), min_size=1, max_size=8, unique=True).map(sorted)


@settings(max_examples=30)
@given(st.tuples(rising, rising))
def test_no_line_of_a_grid_comes_nearer(drawn):
    """Sizes in GB, and longer times for larger ones: there are wilder timings, but no rate that describes them."""
    sizes, times = zip(*zip(*drawn, strict=False), strict=True)
    line = fit_line([size * 1e9 for size in sizes], times)
    found = relative_errors(line.fixed_s, 1 / line.gb_s, sizes, times)
    fixed_s, s_per_gb = np.meshgrid(np.arange(51), np.arange(1, 401) / 8)
    assert found <= relative_errors(fixed_s, s_per_gb, sizes, times).min() + 1e-9

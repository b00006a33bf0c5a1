import pytest

from tests.notebook_code import functions_of
from toolkit.costs.hardware import profile

fig14 = functions_of("hermes/fig14")
visit_gb_s = fig14.visit_gb_s

# GB/s of a cycle-accurate simulator (Ramulator 2.1) with HERMES's timings: bursts a visit, refresh, rate
SIMULATED = [
    *((128, False, 25.600), (2, False, 21.005), (1, False, 10.779)),
    *((128, True, 23.712), (8, True, 23.669), (2, True, 19.579), (1, True, 9.982)),
    *((128, False, 24.910), (128, True, 23.073)),  # four ranks that share a bus
]


@pytest.mark.parametrize(("bursts", "refreshes", "gb_s"), SIMULATED)
def test_rates_are_within_3_percent_of_a_cycle_accurate_simulator(bursts, refreshes, gb_s):
    assert visit_gb_s(64 * bursts, refreshes=refreshes) == pytest.approx(gb_s, rel=0.03)


def test_a_visit_of_one_burst_is_limited_by_banks_by_hand():
    """Eight banks, each opened once in 76 cycles of 0.625 ns: 8 · 64 bytes in 47.5 ns."""
    assert visit_gb_s(64, refreshes=False) == pytest.approx(8 * 64 / 47.5)
    assert visit_gb_s(1, refreshes=False) == pytest.approx(8 / 47.5)  # a burst brings one useful byte


def test_ranks_with_their_own_data_add_up():
    assert visit_gb_s(8192, ranks=4) == pytest.approx(4 * visit_gb_s(8192))
    assert visit_gb_s(8192, refreshes=False) == fig14.PEAK_GB_S == pytest.approx(25.6)


def test_a_product_takes_the_longer_of_bytes_and_multiplications():
    near = profile("hermes-rtx4090").near_data  # 40 GB/s, 48 · 10⁹ multiply-adds a second
    assert near.gemv_s(40e9, 1) == pytest.approx(1.0)
    assert near.gemv_s(1, 48e9) == pytest.approx(1.0)
    assert near.with_multipliers(64).gemv_s(1, 48e9) == pytest.approx(4.0)
    assert near.gemv_s([40e9, 80e9], [0, 0]).tolist() == pytest.approx([1.0, 2.0])

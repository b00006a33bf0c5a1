import pytest

from toolkit.errors import UserError
from toolkit.policies.placement import LayerMap, fitting, needed_bytes
from toolkit.storage.buffers import HUGE_PAGE_BYTES


def test_layers_fill_the_nearest_tier_first():
    assert LayerMap(1, 2, 1).tiers == ("device", "dram", "dram", "storage")
    assert LayerMap(0, 0, 0).tiers == ()


@pytest.mark.parametrize(
    ("layers", "dense", "packed", "refilled"),
    [
        (LayerMap(5, 8, 51), 16, 9, LayerMap(5, 14, 45)),  # 8 · 16 / 9 = 14.2: ENDOR, section 5.1
        (LayerMap(6, 10, 64), 16, 9, LayerMap(6, 17, 57)),  # 17.8, where section C.3 has 20
        (LayerMap(0, 8, 2), 16, 9, LayerMap(0, 10, 0)),  # no more than there are
        (LayerMap(0, 8, 2), 9, 9, LayerMap(0, 8, 2)),
        (LayerMap(2, 0, 3), 16, 9, LayerMap(2, 0, 3)),
    ],
)
def test_packed_layers_take_the_room_of_the_dense_ones(layers, dense, packed, refilled):
    assert layers.refilled(dense, packed) == refilled


def test_layers_that_stay_and_slots_share_a_budget():
    """In huge pages: layers take two where they stay, and one where they pass."""
    stay, passing = [2 * HUGE_PAGE_BYTES] * 3, [HUGE_PAGE_BYTES] * 3
    most = [fitting(stay, passing, 2, pages * HUGE_PAGE_BYTES) for pages in range(8)]
    assert most == [0, 0, 0, 0, 1, 2, 3, 3]  # two slots for two layers that pass, one slot for the last
    assert needed_bytes(stay[:1], passing[1:], 2) == 4 * HUGE_PAGE_BYTES
    assert needed_bytes(stay[:2], passing[2:], 2) == 5 * HUGE_PAGE_BYTES


def test_negative_counts_are_refused():
    with pytest.raises(UserError, match="expected 0 layers or more in each tier"):
        LayerMap(1, -1, 3)

"""Which layer lives where, which expert takes how many bits: hand-worked, and properties of any sizes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolkit.errors import UserError
from toolkit.offload.methods import ACCELERATE
from toolkit.offload.placement import LayerMap, Shares, filled, fitting, least_bytes, needed_bytes, place_layers
from toolkit.offload.ways import Way
from toolkit.quantization.expert_bits import bits_by_usage
from toolkit.storage.buffers import HUGE_PAGE_BYTES


def test_layers_fill_the_nearest_tier_first():
    assert LayerMap(1, 2, 1).tiers == ("device", "dram", "dram", "storage")
    assert LayerMap(0, 0, 0).tiers == ()


def test_spread_layers_in_dram_lie_evenly_between_those_that_are_read():
    d, s = "dram", "storage"
    assert LayerMap(1, 3, 2, spread=True).tiers == ("device", d, d, s, d, s)
    assert LayerMap(0, 1, 3, spread=True).tiers == (d, s, s, s)
    for dram in range(6):
        for storage in range(6):
            tiers = LayerMap(0, dram, storage, spread=True).tiers
            assert (tiers.count(d), tiers.count(s)) == (dram, storage)


def test_packed_layers_take_the_room_of_the_dense_ones():
    for layers, dense, packed, refilled in (
        (LayerMap(5, 8, 51), 16, 9, LayerMap(5, 14, 45)),  # 8 · 16 / 9 = 14.2: ENDOR, section 5.1
        (LayerMap(6, 10, 64), 16, 9, LayerMap(6, 17, 57)),  # 17.8, where section C.3 has 20
        (LayerMap(0, 8, 2), 16, 9, LayerMap(0, 10, 0)),  # no more than there are
        (LayerMap(2, 0, 3), 16, 9, LayerMap(2, 0, 3)),
    ):
        assert layers.refilled(dense, packed) == refilled


def test_layers_that_stay_and_slots_share_a_budget():
    """In huge pages: layers take two where they stay, and one where they pass."""
    stay, passing = [2 * HUGE_PAGE_BYTES] * 3, [HUGE_PAGE_BYTES] * 3
    most = [fitting(stay, passing, 2, pages * HUGE_PAGE_BYTES) for pages in range(8)]
    assert most == [0, 0, 0, 0, 1, 2, 3, 3]  # two slots for two layers that pass, one slot for the last
    sizes = [HUGE_PAGE_BYTES, 3 * HUGE_PAGE_BYTES]  # the first is the one that stays if one does
    assert [fitting(sizes, sizes, 2, pages * HUGE_PAGE_BYTES, spread=True) for pages in (3, 4, 6)] == [0, 2, 2]
    assert needed_bytes(stay[:1], passing[1:], 2) == 4 * HUGE_PAGE_BYTES
    assert needed_bytes(stay[:2], passing[2:], 2) == 5 * HUGE_PAGE_BYTES


def test_layers_are_placed_by_hand():
    """9 layers, 2 of them near; half as large once packed, they are 4, and 8 at a quarter."""
    for mapping, dram in {"storage": 0, "dram": 10, "published": 2, "refilled": 3}.items():  # 13 of 64 layers are near
        assert place_layers(Way("endor", device="cpu"), mapping, 10, 16, 9) == LayerMap(0, dram, 10 - dram)
    packed = Way("endor", device="cpu"), "refilled", 9, 16
    assert place_layers(*packed, 8) == LayerMap(0, 4, 5)
    assert place_layers(*packed, 1) == LayerMap(0, 9, 0)  # none is read, nor should be
    with pytest.raises(UserError, match="layers in storage: 1 of 9"):
        place_layers(*packed, 4)
    assert place_layers(Way(ACCELERATE, device="cpu"), "storage", 1) == LayerMap(0, 0, 1)  # it keeps nothing


TIERS, MB2 = ("dram", "storage"), HUGE_PAGE_BYTES


def test_pieces_fill_a_budget_by_hand():
    """In units of 2 MB: two slots for the largest piece that passes, and what stays."""
    assert filled([MB2] * 4, 2, 4 * MB2) == ("dram",) * 4
    assert filled([MB2] * 4, 2, 3 * MB2) == ("storage",) * 3 + ("dram",)
    assert filled([MB2] * 6, 2, 5 * MB2) == ("storage", "dram") * 3  # every other one
    assert filled([MB2, 4 * MB2, MB2, 2 * MB2], 1, 7 * MB2) == ("storage", "dram") * 2  # the smallest slot
    assert filled([MB2, 4 * MB2], 2, 3 * MB2) == ("storage",) * 2
    assert least_bytes([MB2, 4 * MB2], 2) == 5 * MB2
    assert least_bytes([MB2] * 9, 2) == 2 * MB2


@given(
    sizes=st.lists(st.integers(1, 6), min_size=3, max_size=40),
    slots=st.integers(1, 2),
    more=st.integers(0, 100),
)
def test_pieces_fill_a_budget_to_less_than_the_smallest_that_passes(sizes, slots, more):
    sizes = [size * MB2 for size in sizes]
    budget = least_bytes(sizes, slots) + more * MB2
    tiers = filled(sizes, slots, budget)
    staying, passing = ([size for size, tier in zip(sizes, tiers, strict=True) if tier == it] for it in TIERS)
    assert needed_bytes(staying, passing, slots) <= budget
    assert not passing or sum(staying) + slots * max(passing) + min(passing) > budget


def test_rows_are_shared_by_hand():
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


def test_experts_used_least_take_two_bits():
    """The two least used of four experts; the first of two that are used alike."""
    usage = [np.array([0.1, 0.9, 0.0, 0.1]), np.array([0.5, 0.5, 0.5, 0.5])]
    assert bits_by_usage(usage, 0.5) == [[2, 4, 2, 4], [2, 2, 4, 4]]
    assert bits_by_usage(usage, 0.0, bits=16) == [[16] * 4] * 2
    assert bits_by_usage(usage, 1.0) == [[2] * 4] * 2

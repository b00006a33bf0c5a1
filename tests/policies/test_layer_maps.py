import pytest

from toolkit.errors import UserError
from toolkit.policies.layer_maps import layer_maps, place_layers
from toolkit.policies.methods import ACCELERATE
from toolkit.policies.placement import LayerMap
from toolkit.policies.ways import Way


def test_maps_by_hand():
    # 13 of 64 layers are near; 2 dense ones make room for 3 at 56.25 %
    assert layer_maps(10, 16, 9) == {
        "storage": LayerMap(0, 0, 10),
        "dram": LayerMap(0, 10, 0),
        "published": LayerMap(0, 2, 8),
        "refilled": LayerMap(0, 3, 7),
    }
    assert layer_maps(1, 16, 9)["published"] == LayerMap(0, 0, 1)


def test_layers_are_placed_by_hand():
    """9 layers, 2 of them near; half as large once packed, they are 4, and 8 at a quarter."""
    packed = Way("endor", device="cpu"), "refilled", 9, 16
    assert place_layers(*packed, 8) == LayerMap(0, 4, 5)
    assert place_layers(*packed, 1) == LayerMap(0, 9, 0)  # none is read, nor should be
    with pytest.raises(UserError, match="layers in storage: 1 of 9"):
        place_layers(*packed, 4)
    assert place_layers(Way(ACCELERATE, device="cpu"), "storage", 1) == LayerMap(0, 0, 1)  # it keeps nothing

import dataclasses

import pytest

from tests.offload.conftest import LAYERS
from tests.offload.pretend import DirectThreads
from toolkit.errors import UserError
from toolkit.offload.model import OffloadedModel
from toolkit.offload.options import Options
from toolkit.policies.methods import METHODS
from toolkit.policies.placement import LayerMap
from toolkit.policies.ways import Way, all_ways
from toolkit.storage.readers import READERS


@pytest.fixture(autouse=True)
def direct(monkeypatch):
    """A reader into a GPU's memory that needs no package."""
    monkeypatch.setitem(READERS, "direct", DirectThreads)


@pytest.mark.parametrize("device", ["gpu", "cpu"])
def test_every_way_can_be_asked_for_and_is_told_to_the_cost_model_alike(device):
    torch_name = {"gpu": "cuda:1", "cpu": "cpu"}[device]
    for way in all_ways(["sequential", "pipelined"], device):
        reader = "direct" if way.path == "direct" else "threads"
        options = Options(way.method, policy=way.policy, reader=reader, device=torch_name)
        assert options.way == way
        assert options.stored == METHODS[way.method]


def test_what_cannot_be_is_refused_before_anything_is_opened():
    for wrong, told in [
        ({"method": "gzip"}, "unknown method 'gzip'; choose from: dense"),
        ({"method": "accelerate"}, "unknown method 'accelerate'"),  # measured beside ours, not run by us
        ({"policy": "lazy"}, "unknown policy 'lazy'"),
        ({"reader": "tape"}, "unknown reader 'tape'"),
        ({"device_bytes": 5}, "device_bytes=5: a CPU has no memory but DRAM"),
        ({"reader": "direct"}, "this model computes on the CPU: use reader 'threads'"),
        ({"reader": "direct", "device": "cuda", "method": "zstd"}, "this method unpacks on the CPU"),
    ]:
        with pytest.raises(UserError, match=told):
            Options(**wrong)
        with pytest.raises(UserError, match=told):
            OffloadedModel.open("no folder", **wrong)
    with pytest.raises(TypeError, match="dram"):
        OffloadedModel.open("no folder", dram=5)


def test_options_are_frozen_and_a_model_opens_with_them(packed):
    options = Options("dense", placement=LayerMap(0, 1, LAYERS - 1), policy="sequential")
    with pytest.raises(dataclasses.FrozenInstanceError):
        options.policy = "pipelined"
    with OffloadedModel.from_options(packed("llama")[1], options) as ours:
        assert ours.placement == options.placement
    assert options.way == Way("dense", policy="sequential", device="cpu")

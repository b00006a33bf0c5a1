import pytest

from tests.offload.pretend import DirectThreads
from toolkit.commands.folder import method_of
from toolkit.errors import UserError
from toolkit.formats import FORMATS
from toolkit.offload.methods import METHODS, Method, find_method, usual_method
from toolkit.offload.model import OffloadedModel
from toolkit.offload.options import Options
from toolkit.offload.ways import all_ways
from toolkit.storage.readers import READERS

NO_BYTES = (float("nan"), -1, "500MB", True)


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
        ({"method": "gzip"}, "unknown method 'gzip'; choose from: csr, dense"),
        ({"method": "accelerate"}, "unknown method 'accelerate'"),  # measured beside ours, not run by us
        *(({"dram_bytes": wrong}, "dram_bytes=.*expected a number of bytes from 0") for wrong in NO_BYTES),
        ({"device_bytes": 5}, "device_bytes=5: a CPU has no memory but DRAM"),
        ({"reader": "direct"}, "this model computes on the CPU: leave it out"),
        ({"reader": "direct", "device": "cuda", "method": "zstd"}, "this method unpacks on the CPU"),
    ]:
        with pytest.raises(UserError, match=told):
            Options(**wrong)
        with pytest.raises(UserError, match=told):
            OffloadedModel.open("no folder", **wrong)


def test_what_is_run_without_a_method_is_what_the_command_runs():
    for form in (*FORMATS, "gguf"):
        assert usual_method(form) == method_of(form, None, "cpu")
        assert usual_method(form, on_gpu=True) == method_of(form, None, "cuda") == form
    assert Options().way.method == usual_method("endor") == "endor_packed"


def test_every_format_is_a_method_and_every_product_one_more():
    for name, form in FORMATS.items():
        assert find_method(name).format == name
        assert Options(name).way.stored == find_method(name)
        assert find_method(name) == METHODS.get(name, Method(name, "dram"))
        if form.has_matvec:
            assert find_method(f"{name}_packed").used_packed
        else:
            with pytest.raises(UserError, match=f"unknown method '{name}_packed'"):
                Options(f"{name}_packed")

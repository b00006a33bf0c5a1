import ctypes
import mmap

import pytest
import torch
from torch import nn

from tests.models.test_twins import TOYS
from toolkit.errors import UserError
from toolkit.measure import contestant
from toolkit.measure.accelerate import AcceleratedLinear, AcceleratedModel, DiskOffloaded
from toolkit.measure.contestant import greedy_text
from toolkit.measure.turns import take_turns
from toolkit.models import decoder_blocks, shapes
from toolkit.models.shapes import random_pruned
from toolkit.models.twins import twin_model
from toolkit.storage.direct import drop_pages


def resident_pages(file) -> int:
    """How many of a file's pages the page cache holds, as the kernel has it."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(file, "rb") as stream, mmap.mmap(stream.fileno(), 0, mmap.MAP_PRIVATE) as pages:
        view = (ctypes.c_char * len(pages)).from_buffer(pages)
        flags = (ctypes.c_ubyte * -(-len(pages) // mmap.PAGESIZE))()
        wrong = libc.mincore(ctypes.c_void_p(ctypes.addressof(view)), ctypes.c_size_t(len(pages)), flags)
        del view
    assert wrong == 0
    return sum(flag & 1 for flag in flags)


def timed(rival: DiskOffloaded, x: torch.Tensor):
    """The product and its timeline, read from the disk."""
    for file in rival.files:
        drop_pages(file)
    begun_s = rival.recorder.now_s()
    result = rival.module(x)
    return result, rival.recorder.timeline().window(begun_s, rival.recorder.now_s())


@pytest.fixture
def layers():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(300, 400), nn.ReLU(), nn.Linear(400, 200, bias=False)).requires_grad_(False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_gives_what_the_module_in_memory_gives(layers, tmp_path, dtype):
    layers, x = layers.to(dtype), torch.randn(1, 300).to(dtype)
    expected, nbytes = layers(x), {name: tensor.nbytes for name, tensor in layers.state_dict().items()}
    rival = DiskOffloaded(layers, tmp_path / "weights")
    assert all(parameter.is_meta for parameter in layers.parameters())
    result, timeline = timed(rival, x)
    assert torch.equal(result, expected)
    reads = [span for span in timeline.spans if span.stage == "read"]
    assert {span.op: span.nbytes for span in reads} == nbytes
    assert {span.stage for span in timeline.spans} == {"read", "other"}
    assert timeline.busy_s("read") + timeline.busy_s("other") == pytest.approx(timeline.total_s)
    assert min(span.start_s for span in timeline.spans) == 0


def test_it_is_what_disk_offload_sets_up(layers, tmp_path):
    from accelerate import disk_offload

    theirs = disk_offload(nn.Sequential(*layers), tmp_path / "theirs", execution_device=torch.device("cpu"))
    hooks = {name: type(part._hf_hook) for name, part in theirs.named_modules() if hasattr(part, "_hf_hook")}
    torch.manual_seed(0)
    ours = nn.Sequential(nn.Linear(300, 400), nn.ReLU(), nn.Linear(400, 200, bias=False))
    DiskOffloaded(ours, tmp_path / "ours")
    assert {name: type(part._hf_hook) for name, part in ours.named_modules() if hasattr(part, "_hf_hook")} == hooks
    for name, part in ours.named_modules():
        for setting in ("execution_device", "offload", "io_same_device", "place_submodules"):
            other = getattr(theirs.get_submodule(name), "_hf_hook", None)
            assert getattr(getattr(part, "_hf_hook", None), setting, None) == getattr(other, setting, None)
    names = {file.name for file in (tmp_path / "ours").iterdir()}
    assert names == {file.name for file in (tmp_path / "theirs").iterdir()}


@pytest.mark.parametrize(("room", "kept"), [(9.0, 2), (2.2, 1)])
def test_it_keeps_what_fits_within_a_limit(tmp_path, monkeypatch, room, kept):
    """Beside what stays there is room for the largest layer, here the embedding, but where all fit."""
    monkeypatch.setitem(shapes.SHAPES, "toy-llama", TOYS["toy-llama"])
    model = twin_model("toy-llama", 4)
    text = greedy_text(model, torch.tensor([[7, 5]]), 2, 0.0)
    block = sum(weight.nbytes for weight in decoder_blocks(model)[0].parameters())
    embedding = model.model.embed_tokens.weight.nbytes
    whole = sum(weight.nbytes for weight in model.parameters())
    limit = embedding + int(room * block)
    rival = AcceleratedModel("accelerate", model, tmp_path, text, {}, limit)
    spans = take_turns([rival], repetitions=1, tokens=2)
    read = spans.loc[spans["stage"] == "read", "nbytes"].sum()
    assert read == 2 * rival.nbytes
    assert rival.memory == limit >= rival.held_bytes
    if room == 9:
        assert rival.nbytes == 0
    else:
        assert rival.nbytes == whole - embedding - kept * block
    with pytest.raises(UserError, match="Accelerate within 0 MB: nothing fits"):
        AcceleratedModel("accelerate", twin_model("toy-llama", 1), tmp_path / "x", text, {}, 100)


def test_a_linear_reads_its_weight_in_each_turn(tmp_path, monkeypatch):
    dropped = []
    monkeypatch.setattr(contestant, "drop_pages", lambda file: dropped.append(file.name))
    rival = AcceleratedLinear(random_pruned((48, 80), 0.5), tmp_path / "weights", {"method": "accelerate"})
    spans = take_turns([rival], repetitions=2)
    assert spans.loc[spans["stage"] == "read", "op"].tolist() == ["weight"] * 2
    assert dropped.count("weight.dat") == 2
    assert set(spans["mode"]) == {"buffered"}
    monkeypatch.setattr(AcceleratedLinear, "token", lambda self, number: self.linear(self.vector) + 1)
    with pytest.raises(UserError, match="accelerate gives another output than the weight in memory"):
        take_turns([rival], repetitions=1)

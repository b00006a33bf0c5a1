import contextlib
import sys
import types

import pytest
import torch

from tests.offload.conftest import LAYERS
from toolkit.errors import UserError
from toolkit.offload import device
from toolkit.offload.device import Cuda, open_device
from toolkit.offload.model import OffloadedModel
from toolkit.policies.placement import LayerMap
from toolkit.storage.direct import BLOCK_BYTES

NO_GPU = not torch.cuda.is_available()


@pytest.mark.skipif(not NO_GPU, reason="there is a GPU")
def test_no_gpu(packed):
    for name in ("cuda", "cuda:3"):
        with pytest.raises(
            UserError, match=rf"device '{name}' needs a CUDA GPU, and torch sees none; use device='cpu'"
        ):
            OffloadedModel.open(packed("llama")[1], device=name)


class Stub(types.SimpleNamespace):
    """torch.cuda with two GPUs: it notes each call, and what it is asked to fail in."""

    def __init__(self):
        self.calls = []
        stream = types.SimpleNamespace(synchronize=lambda: self.calls.append("copies are done"))
        current = types.SimpleNamespace(synchronize=lambda: self.calls.append("work is done"))
        event = types.SimpleNamespace(record=lambda stream: self.calls.append(("mark", stream is current)))
        runtime = types.SimpleNamespace(
            cudaHostRegister=lambda address, nbytes, flags: self.calls.append(("pin", address, nbytes)) or self.pinning,
            cudaHostUnregister=lambda address: self.calls.append(("unpin", address)),
        )
        super().__init__(
            pinning=0,
            is_available=lambda: True,
            device_count=lambda: 2,
            current_device=lambda: 0,
            device=lambda chosen: contextlib.nullcontext(),
            empty_cache=lambda: self.calls.append("kept memory is given back"),
            mem_get_info=lambda device: (3_000_000, 9_000_000),
            Stream=lambda device: stream,
            stream=lambda chosen: _Noted(self.calls, "copy" if chosen is stream else "elsewhere"),
            current_stream=lambda device: current,
            synchronize=lambda device: self.calls.append("all is done"),
            Event=lambda blocking: event,
            cudart=lambda: runtime,
        )


class _Noted:
    def __init__(self, calls, name):
        self.calls, self.name = calls, name

    def __enter__(self):
        self.calls.append(self.name)

    def __exit__(self, *error):
        self.calls.append(f"{self.name} given")


@pytest.fixture
def stub(monkeypatch):
    """`Cuda` on a torch that has no GPU: its memory is the host's."""
    stubbed, empty = Stub(), torch.empty
    monkeypatch.setattr(torch, "cuda", stubbed)
    monkeypatch.setattr(torch, "empty", lambda *sizes, device=None, **named: empty(*sizes, **named))
    monkeypatch.setattr(device, "find_spec", lambda name: name)
    return stubbed


def test_copies_wait_for_themselves_and_not_for_the_work(stub):
    with open_device("cuda") as gpu:
        source, target = gpu.pinned_buffer(5000), gpu.empty(5000)
        source[:] = 7
        gpu.copy(source, target)
        assert stub.calls[1:] == ["copy", "copy given", "copies are done"]
        assert target.eq(7).all()
        gpu.mark()
        gpu.wait()
        assert stub.calls[-2:] == [("mark", True), "work is done"]
    address = source.ctypes.data
    assert stub.calls[0] == ("pin", address, 5000)
    assert stub.calls[-2:] == ["all is done", ("unpin", address)]


@pytest.mark.parametrize("nbytes", [0, 1, 4096, 5001])
def test_memory_starts_on_a_page(stub, nbytes):
    gpu = Cuda("cuda:1")
    assert str(gpu.torch_device) == "cuda:1"
    buffer = gpu.empty(nbytes)
    assert buffer.numel() == nbytes
    assert buffer.data_ptr() % BLOCK_BYTES == 0 or nbytes == 0
    assert gpu.pinned_buffer(nbytes).nbytes == nbytes


def test_memory_that_runs_out(stub, monkeypatch):
    gpu = open_device("cuda")

    def full(*sizes, **named):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch, "empty", full)
    told = r"cuda:0 ran out of memory, with 3\.0 MB free: set device_bytes lower"
    with pytest.raises(UserError, match=told):
        gpu.empty(5_000_000)
    with pytest.raises(UserError, match=told), gpu.within_memory():
        full()
    assert "kept memory is given back" in stub.calls
    stub.pinning = 2
    with pytest.raises(UserError, match=r"5\.0 MB cannot be pinned \(CUDA error 2\): set dram_bytes lower"):
        gpu.pinned_buffer(5_000_000)


def test_gpus_and_packages_that_are_not_there(stub, monkeypatch):
    with pytest.raises(UserError, match="device 'cuda:2': torch sees 2 GPUs, the first of them cuda:0"):
        open_device("cuda:2")
    monkeypatch.setattr(device, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"needs numba-cuda: pip install -e '\.\[cuda\]'"):
        open_device("cuda")


@pytest.mark.skipif(NO_GPU, reason="needs a CUDA GPU")
@pytest.mark.parametrize("method", ["dense", "zstd", "endor_cpu", "endor", "endor_packed"])
def test_a_real_gpu_gives_what_the_model_gives_there(packed, method):
    model, folder = packed("llama", torch.float32)
    prompt = torch.tensor([[5, 17, 3, 44, 8, 1]], device="cuda")
    expected = model.to("cuda")(prompt).logits
    model.to("cpu")
    placement = LayerMap(1, 1, LAYERS - 2)
    with OffloadedModel.open(folder, method, placement=placement, device="cuda") as ours, torch.no_grad():
        for _ in range(3):
            assert torch.equal(ours.model(prompt).logits, expected)
        single = ours.model(prompt[:, :1]).logits
    torch.testing.assert_close(single, expected[:, :1], rtol=0.05, atol=0.02)


def test_nothing_of_cuda_is_imported_for_the_cpu(packed):
    loaded = {name for name in sys.modules if name.startswith(("numba_cuda", "numba.cuda"))}
    with OffloadedModel.open(packed("llama")[1]) as ours:
        ours.model(torch.tensor([[1]]))
    assert {name for name in sys.modules if name.startswith(("numba_cuda", "numba.cuda"))} == loaded

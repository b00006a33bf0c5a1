from unittest.mock import MagicMock

import pytest
import torch

from tests.offload.conftest import LAYERS
from toolkit.errors import UserError
from toolkit.offload import device
from toolkit.offload.device import open_device
from toolkit.offload.model import OffloadedModel
from toolkit.offload.placement import LayerMap
from toolkit.storage.direct import BLOCK_BYTES

NO_GPU = not torch.cuda.is_available()


@pytest.mark.skipif(not NO_GPU, reason="there is a GPU")
def test_no_gpu(packed):
    with pytest.raises(UserError, match="device 'cuda:3' needs a CUDA GPU, and torch sees none; use device='cpu'"):
        OffloadedModel.open(packed("llama")[1], device="cuda:3")


@pytest.fixture
def stub(monkeypatch):
    """`Cuda` on a torch that has two GPUs and notes its calls: their memory is the host's."""
    stubbed, empty = MagicMock(), torch.empty
    stubbed.is_available.return_value, stubbed.device_count.return_value = True, 2
    stubbed.current_device.return_value, stubbed.mem_get_info.return_value = 0, (3_000_000, 9_000_000)
    stubbed.cudart().cudaHostRegister.return_value = 0
    monkeypatch.setattr(torch, "cuda", stubbed)
    monkeypatch.setattr(torch, "empty", lambda *sizes, device=None, **named: empty(*sizes, **named))
    monkeypatch.setattr(device, "find_spec", lambda name: name)
    return stubbed


def test_memory_is_aligned_and_unpinned_and_copies_wait_for_themselves_alone(stub):
    with open_device("cuda:1") as gpu:
        assert str(gpu.torch_device) == "cuda:1"
        for nbytes in (0, 1, 4096, 5001):
            source, target = gpu.pinned_buffer(nbytes), gpu.empty(nbytes)
            source[:] = 7
            gpu.copy(source, target)
            assert target.eq(7).all()
            assert target.numel() == source.nbytes == nbytes
            assert target.data_ptr() % BLOCK_BYTES == 0 or nbytes == 0
        assert stub.Stream().synchronize.call_count == 4
        assert not stub.current_stream().synchronize.called
        gpu.mark()
        stub.Event().record.assert_called_with(stub.current_stream())
        gpu.wait()
        assert stub.current_stream().synchronize.called
        assert not stub.cudart().cudaHostUnregister.called
    assert stub.cudart().cudaHostRegister.call_count == stub.cudart().cudaHostUnregister.call_count == 3


def test_memory_that_runs_out(stub, monkeypatch):
    gpu = open_device("cuda")
    monkeypatch.setattr(torch, "empty", MagicMock(side_effect=torch.OutOfMemoryError("CUDA out of memory")))
    with pytest.raises(UserError, match=r"cuda:0 ran out of memory, with 3\.0 MB free: set device_bytes lower"):
        gpu.empty(5_000_000)
    assert stub.empty_cache.called
    stub.cudart().cudaHostRegister.return_value = 2
    with pytest.raises(UserError, match=r"5\.0 MB cannot be pinned \(CUDA error 2\): set dram_bytes lower"):
        gpu.pinned_buffer(5_000_000)


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

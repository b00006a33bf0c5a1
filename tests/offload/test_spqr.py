"""Quantised models from disk give what the quantised model in memory gives."""

from itertools import cycle

import pytest
import torch

from tests.offload.conftest import LAYERS, pruned
from tests.offload.pretend import PretendGpu
from toolkit.errors import UserError
from toolkit.formats import QUANTISED
from toolkit.offload import model as offloaded
from toolkit.offload.linear import MOST_VECTORS
from toolkit.offload.model import OffloadedModel
from toolkit.policies.placement import LayerMap
from toolkit.quantization.spqr import SpQR
from toolkit.sparsity import Calibration, calibration, changed, load_changed
from toolkit.storage import buffers
from toolkit.storage.direct import BLOCK_BYTES
from toolkit.storage.packing import ChangedLinears, pack_model
from toolkit.storage.store import Store

pytestmark = pytest.mark.usefixtures("one_thread")
PROMPT = torch.tensor([[5, 17, 3, 44, 8, 1]])
LONG = torch.arange(MOST_VECTORS + 1)[None]  # decoded by every method
SPREAD = LayerMap(0, 1, LAYERS - 1)


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """`served(family, dtype)`: a quantised model, and the folder where it lies in both formats of one variant."""
    made = {}

    def make(family, dtype):
        if (family, dtype) not in made:
            folder, forms = tmp_path_factory.mktemp(family), cycle(QUANTISED.values())
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("TOOLKIT_CACHE_DIR", str(folder))
                patch.setattr(changed, "load_model", lambda name, dtype: (pruned(name, dtype), None))
                patch.setattr(calibration, "load_tokens", lambda *_: torch.arange(64) % 61)
                model = load_changed(family, SpQR(0.05, reorder=True), Calibration(sequence_length=16), dtype)
            pack = lambda matrix, dtype: next(forms).from_quantised(matrix, dtype)  # noqa: E731
            pack_model(model.model, folder / "store", ChangedLinears(model, "spqr", pack), family, model.tokenizer)
            made[family, dtype] = model.model, folder / "store"
        return made[family, dtype]

    return make


@pytest.mark.parametrize("family", ["llama", "opt"])  # both have biases
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_store_of_both_formats_gives_the_logits_of_the_model_in_memory(served, family, dtype):
    model, folder = served(family, dtype)
    assert {run.format for run in Store.open(folder).index.ops} == QUANTISED.keys()
    for method in ("spqr", "spqr_packed"):
        with torch.no_grad(), OffloadedModel.open(folder, method, placement=SPREAD) as ours:
            assert torch.equal(ours.model(LONG).logits, model(LONG).logits)
            for tokens in (PROMPT, PROMPT[:, :1]):
                found, expected = ours.model(tokens).logits, model(tokens).logits
                tolerance = 8 * LAYERS * max(2**-10, torch.finfo(dtype).eps) * float(expected.abs().max())
                torch.testing.assert_close(found, expected, rtol=0, atol=tolerance if method == "spqr_packed" else 0)
                assert torch.equal(found, expected) != (method == "spqr_packed")


def test_a_gpu_gets_weights_that_the_cpu_decoded(served, monkeypatch):
    model, folder = served("llama", torch.bfloat16)
    monkeypatch.setattr(offloaded, "open_device", lambda name: PretendGpu())
    where = LayerMap(1, 1, LAYERS - 2)
    with torch.no_grad(), OffloadedModel.open(folder, "spqr", placement=where, device="cuda") as ours:
        assert torch.equal(ours.model(PROMPT).logits, model(PROMPT).logits)


def test_a_budget_that_the_quantised_layers_exceed_streams_them(served, monkeypatch):
    monkeypatch.setattr(buffers, "HUGE_PAGE_BYTES", BLOCK_BYTES)
    model, folder = served("llama", torch.float32)
    store = Store.open(folder)
    needed = store.rest_bytes + 4 * 70 * 48 + 2 * store.slot_bytes("spqr")
    with torch.no_grad(), OffloadedModel.open(folder, "spqr", dram_bytes=needed) as ours:
        assert torch.equal(ours.model(PROMPT).logits, model(PROMPT).logits)
        assert ours.placement.storage
    with pytest.raises(UserError, match="is too small"):
        OffloadedModel.open(folder, "spqr", dram_bytes=needed - 1)

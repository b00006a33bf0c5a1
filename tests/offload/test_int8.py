"""Models whose weights are int8 with scales: from disk they give what the rounded model in memory gives."""

import copy

import pytest
import torch

from tests.offload.conftest import LAYERS, pruned
from tests.offload.pretend import PretendGpu
from toolkit.errors import UserError
from toolkit.formats import encode
from toolkit.formats.scaled import Scaled
from toolkit.models import decoder_blocks
from toolkit.offload import model as offloaded
from toolkit.offload.model import OffloadedModel
from toolkit.policies.methods import METHODS
from toolkit.policies.placement import LayerMap
from toolkit.quantization import absmax_int8
from toolkit.quantization.smoothquant import round_to_int8, smooth
from toolkit.storage import buffers
from toolkit.storage.direct import BLOCK_BYTES
from toolkit.storage.packing import Linears, pack_model
from toolkit.storage.store import Store

pytestmark = pytest.mark.usefixtures("one_thread")
PROMPT = torch.tensor([[5, 17, 3, 44, 8, 1]])
GREEDY = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
FORMS = ("endor", "zstd", "dense")
LARGEST = 70 * 48  # elements of the largest weight
FLOATS = [torch.float32, torch.bfloat16, torch.float16]


def packing(form):
    return lambda weight: Scaled.encode(form, weight)


@pytest.fixture(scope="module")
def int8(tmp_path_factory):
    """`int8(family, dtype)`: the smoothed model, rounded, and the folder that its int8 weights are packed in."""
    made = {}

    def make(family="llama", dtype=torch.float32):
        if (family, dtype) not in made:
            model = pruned(family, dtype)
            calibration = torch.arange(64) % 61
            smooth(model, calibration.view(-1, 16))
            folder = tmp_path_factory.mktemp(family) / "store"
            pack_model(model, folder, Linears({form: packing(form) for form in FORMS}), family)
            rounded = copy.deepcopy(model)
            round_to_int8(rounded)
            assert not torch.equal(rounded(PROMPT).logits, model(PROMPT).logits)
            made[family, dtype] = rounded, folder
        return made[family, dtype]

    return make


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_every_method_gives_the_rounded_models_logits(int8, method, dtype):
    model, folder = int8("llama", dtype)
    with torch.no_grad(), OffloadedModel.open(folder, method, placement=LayerMap(0, 1, LAYERS - 1)) as ours:
        if METHODS[method].decoded_in or METHODS[method].format == "dense":
            assert torch.equal(ours.model(PROMPT).logits, model(PROMPT).logits)
            assert torch.equal(ours.generate(PROMPT, **GREEDY), model.generate(PROMPT, **GREEDY))
        single, found = model(PROMPT[:, :1]).logits, ours.model(PROMPT[:, :1]).logits
        tolerance = 4 * LAYERS * torch.finfo(dtype).eps * float(single.abs().max())
        torch.testing.assert_close(found, single, rtol=0, atol=tolerance)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("placement", [LayerMap(1, 1, LAYERS - 2), LayerMap(LAYERS, 0, 0)])
def test_scales_come_along_to_a_gpu(int8, monkeypatch, method, placement):
    model, folder = int8("llama", torch.bfloat16)
    monkeypatch.setattr(offloaded, "open_device", lambda name: PretendGpu())
    with torch.no_grad(), OffloadedModel.open(folder, method, placement=placement, device="cuda") as ours:
        for _ in range(2):
            assert torch.equal(ours.model(PROMPT).logits, model(PROMPT).logits)


@pytest.mark.parametrize(
    ("method", "scratch_bytes"),
    [("dense", 4 * LARGEST), ("endor", 5 * LARGEST), ("zstd", 5 * LARGEST), ("endor_packed", 5 * LARGEST)],
)
def test_the_budget_counts_integers_and_what_they_stand_for(int8, monkeypatch, method, scratch_bytes):
    monkeypatch.setattr(buffers, "HUGE_PAGE_BYTES", BLOCK_BYTES)
    model, folder = int8("llama")
    store = Store.open(folder)
    slots = 2 * store.slot_bytes(METHODS[method].format)
    limit = store.rest_bytes + scratch_bytes + slots
    with torch.no_grad(), OffloadedModel.open(folder, method, dram_bytes=limit) as ours:
        torch.testing.assert_close(ours.model(PROMPT).logits, model(PROMPT).logits)
        assert ours.budgets["dram"].taken["scratch"] == scratch_bytes
        assert ours.budgets["dram"].used_bytes <= limit
    with pytest.raises(UserError, match="too small"):
        OffloadedModel.open(folder, method, dram_bytes=limit - 1)


def test_integers_without_scales_are_no_weights(tmp_path):
    model = pruned("llama")
    pack_model(model, tmp_path / "s", Linears({"endor": lambda weight: encode("endor", absmax_int8(weight))}))
    with pytest.raises(UserError, match=r"layer 0 .* is torch.int8 without scales.*--int8"):
        OffloadedModel.open(tmp_path / "s")


def test_smoothed_norms_travel_with_the_weights(int8):
    """The store of one model cannot run under the norms of another: both are in it."""
    model, folder = int8("llama")
    stored = dict(Store.open(folder).rest())
    for number, block in enumerate(decoder_blocks(model)):
        name = f"model.layers.{number}.input_layernorm.weight"
        assert torch.equal(stored[name], block.input_layernorm.weight)
        assert not torch.equal(stored[name], torch.ones_like(stored[name]))

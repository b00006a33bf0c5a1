"""Int8 weights with scales, and SpQR's: from disk they give what the quantised model in memory gives."""

import copy
from itertools import cycle

import pytest
import torch

from tests.kernels.families import each_with_one
from tests.offload.conftest import LAYERS, pruned
from tests.offload.pretend import PretendGpu
from toolkit.errors import UserError
from toolkit.formats import QUANTISED, encode
from toolkit.formats.scaled import Scaled
from toolkit.models import decoder_blocks
from toolkit.offload import model as offloaded
from toolkit.offload.linear import MOST_VECTORS
from toolkit.offload.methods import METHODS
from toolkit.offload.model import OffloadedModel
from toolkit.offload.placement import LayerMap
from toolkit.quantization import absmax_int8
from toolkit.quantization.smoothquant import round_to_int8, smooth
from toolkit.quantization.spqr import SpQR
from toolkit.sparsity import Calibration, calibration, changed, load_changed
from toolkit.storage import buffers
from toolkit.storage.direct import BLOCK_BYTES
from toolkit.storage.packing import ChangedLinears, Linears, Made, pack_model
from toolkit.storage.store import Store

pytestmark = pytest.mark.usefixtures("one_thread")
PROMPT = torch.tensor([[5, 17, 3, 44, 8, 1]])
LONG = torch.arange(MOST_VECTORS + 1)[None]  # decoded by every method
GREEDY = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
SPREAD = LayerMap(0, 1, LAYERS - 1)
FORMS = {form: lambda weight, form=form: Scaled.encode(form, weight) for form in ("endor", "zstd", "dense")}
DTYPES = (torch.bfloat16, torch.float32, torch.float16)
LARGEST = 70 * 48  # elements of the largest weight


def int8(family, dtype, folder):
    """The smoothed model, rounded; its folder has all forms."""
    model = pruned(family, dtype)
    smooth(model, (torch.arange(64) % 61).view(-1, 16))
    pack_model(model, folder, Linears(FORMS), family)
    rounded = copy.deepcopy(model)
    round_to_int8(rounded)
    assert not torch.equal(rounded(PROMPT).logits, model(PROMPT).logits)
    return rounded


def spqr(family, dtype, folder):
    """A quantised model; its folder has both formats in one variant."""
    forms = cycle(QUANTISED.values())
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TOOLKIT_CACHE_DIR", str(folder.parent))
        patch.setattr(changed, "load_model", lambda name, dtype: (pruned(name, dtype), None))
        patch.setattr(calibration, "load_tokens", lambda *_: torch.arange(64) % 61)
        model = load_changed(family, SpQR(0.05, reorder=True), Calibration(sequence_length=16), dtype)
    pack = lambda matrix, dtype: next(forms).from_quantised(matrix, dtype)  # noqa: E731
    pack_model(model.model, folder, ChangedLinears("spqr", pack), family, model.tokenizer, treatment=Made(model))
    assert {run.format for run in Store.open(folder).index.ops} == QUANTISED.keys()
    return model.model


@pytest.fixture(scope="module")
def quantised(tmp_path_factory):
    """`quantised(make, family, dtype)`: a quantised model and its folder, made once."""
    made = {}

    def get(make, family="llama", dtype=torch.float32):
        key = make, family, dtype
        if key not in made:
            folder = tmp_path_factory.mktemp(family) / "store"
            made[key] = make(family, dtype, folder), folder
        return made[key]

    return get


@pytest.mark.parametrize(("method", "dtype"), each_with_one([*METHODS], DTYPES))
def test_every_method_gives_the_rounded_models_logits(quantised, method, dtype):
    model, folder = quantised(int8, "llama", dtype)
    with torch.no_grad(), OffloadedModel.open(folder, method, placement=SPREAD) as ours:
        if METHODS[method].decoded_in or METHODS[method].format == "dense":
            assert torch.equal(ours.model(PROMPT).logits, model(PROMPT).logits)
            assert torch.equal(ours.generate(PROMPT, **GREEDY), model.generate(PROMPT, **GREEDY))
        single, found = model(PROMPT[:, :1]).logits, ours.model(PROMPT[:, :1]).logits
        tolerance = 4 * LAYERS * torch.finfo(dtype).eps * float(single.abs().max())
        torch.testing.assert_close(found, single, rtol=0, atol=tolerance)


@pytest.mark.parametrize(("family", "dtype"), [("llama", torch.float32), ("opt", torch.bfloat16)])  # both have biases
def test_a_store_of_both_formats_gives_the_logits_of_the_model_in_memory(quantised, family, dtype):
    model, folder = quantised(spqr, family, dtype)
    for method in ("spqr", "spqr_packed"):
        with torch.no_grad(), OffloadedModel.open(folder, method, placement=SPREAD) as ours:
            assert torch.equal(ours.model(LONG).logits, model(LONG).logits)
            for tokens in (PROMPT, PROMPT[:, :1]):
                found, expected = ours.model(tokens).logits, model(tokens).logits
                tolerance = 8 * LAYERS * max(2**-10, torch.finfo(dtype).eps) * float(expected.abs().max())
                torch.testing.assert_close(found, expected, rtol=0, atol=tolerance if method == "spqr_packed" else 0)
                assert torch.equal(found, expected) != (method == "spqr_packed")


@pytest.mark.parametrize(("make", "method"), [*((int8, method) for method in METHODS), (spqr, "spqr")])
def test_scales_come_along_to_a_gpu(quantised, monkeypatch, make, method):
    model, folder = quantised(make, "llama", torch.bfloat16)
    monkeypatch.setattr(offloaded, "open_device", lambda name: PretendGpu())
    for placement in (LayerMap(1, 1, LAYERS - 2), LayerMap(LAYERS, 0, 0)):
        with torch.no_grad(), OffloadedModel.open(folder, method, placement=placement, device="cuda") as ours:
            for _ in range(2):
                assert torch.equal(ours.model(PROMPT).logits, model(PROMPT).logits)


@pytest.mark.parametrize(
    ("make", "method", "element_bytes"),  # integers, and what they stand for
    [(int8, "dense", 4), (int8, "endor", 5), (int8, "endor_packed", 5), (spqr, "spqr", 4)],
)
def test_the_budget_counts_integers_and_what_they_stand_for(quantised, monkeypatch, make, method, element_bytes):
    monkeypatch.setattr(buffers, "HUGE_PAGE_BYTES", BLOCK_BYTES)
    model, folder = quantised(make)
    store, form = Store.open(folder), method.removesuffix("_packed")
    limit = store.rest_bytes + element_bytes * LARGEST + 2 * store.slot_bytes(form)
    with torch.no_grad(), OffloadedModel.open(folder, method, dram_bytes=limit) as ours:
        torch.testing.assert_close(ours.model(PROMPT).logits, model(PROMPT).logits)
        assert ours.placement.storage
        assert ours.budgets["dram"].taken["scratch"] == element_bytes * LARGEST
        assert ours.budgets["dram"].used_bytes <= limit
    with pytest.raises(UserError, match="too small"):
        OffloadedModel.open(folder, method, dram_bytes=limit - 1)


def test_integers_without_scales_are_no_weights(tmp_path):
    model = pruned("llama")
    pack_model(model, tmp_path / "s", Linears({"endor": lambda weight: encode("endor", absmax_int8(weight))}))
    with pytest.raises(UserError, match=r"layer 0 .* is torch.int8 without scales.*--int8"):
        OffloadedModel.open(tmp_path / "s")


def test_smoothed_norms_travel_with_the_weights(quantised):
    """The store of one model cannot run under the norms of another: both are in it."""
    model, folder = quantised(int8)
    stored = dict(Store.open(folder).rest())
    for number, block in enumerate(decoder_blocks(model)):
        name = f"model.layers.{number}.input_layernorm.weight"
        assert torch.equal(stored[name], block.input_layernorm.weight)
        assert not torch.equal(stored[name], torch.ones_like(stored[name]))

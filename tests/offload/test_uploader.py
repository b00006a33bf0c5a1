"""The tier of a GPU: with one that the CPU plays, and, where there is one, with a real one."""

import threading
from itertools import cycle, product

import pytest
import torch

from tests.offload.conftest import LAYERS
from tests.offload.pretend import DirectThreads, PretendGpu, whole
from toolkit.errors import UserError
from toolkit.offload import model as module
from toolkit.offload.methods import METHODS
from toolkit.offload.model import OffloadedModel
from toolkit.offload.placement import LayerMap
from toolkit.offload.ways import POLICIES
from toolkit.storage import buffers
from toolkit.storage.direct import BLOCK_BYTES
from toolkit.storage.readers import READERS
from toolkit.storage.store import Store

PROMPT = torch.tensor([[5, 17, 3, 44, 8, 1]])
GREEDY = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
MIXED = LayerMap(1, 1, LAYERS - 2)
SPREAD = [LayerMap(0, 0, LAYERS), LayerMap(0, LAYERS, 0), LayerMap(LAYERS, 0, 0), MIXED, LayerMap(1, 0, LAYERS - 1)]


@pytest.fixture(autouse=True)
def gpu(monkeypatch):
    pretended = PretendGpu()
    monkeypatch.setattr(module, "open_device", lambda name: pretended)
    monkeypatch.setitem(READERS, "direct", DirectThreads)
    return pretended


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model(PROMPT).logits


WHERE = [(*case, policy) for case, policy in zip(product(METHODS, SPREAD), cycle(POLICIES), strict=False)]


@pytest.mark.parametrize(("method", "placement", "policy"), WHERE)
def test_every_method_gives_the_same_tokens_wherever_layers_live(packed, method, placement, policy):
    """By the policies in turns."""
    model, folder = packed("llama")
    with OffloadedModel.open(folder, method, placement=placement, policy=policy, device="cuda") as ours:
        for _ in range(2):
            assert torch.equal(logits(ours.model), logits(model))
        if placement == MIXED:
            assert torch.equal(ours.generate(PROMPT, **GREEDY), model.generate(PROMPT, **GREEDY))


@pytest.mark.parametrize("method", ["dense", "endor", "endor_packed"])
def test_direct_reads_pass_dram_by(packed, gpu, method):
    model, folder = packed("llama")
    with OffloadedModel.open(folder, method, placement=MIXED, device="cuda", reader="direct") as ours:
        assert torch.equal(ours.generate(PROMPT, **GREEDY), model.generate(PROMPT, **GREEDY))
        table = ours.timeline.table()
    assert set(table[table["stage"] == "read"]["layer"]) == {2, 3}
    assert set(table[table["stage"] == "copy"]["layer"]) == {0, 1}  # 0 once, on its way to where it stays
    stored = Store.open(folder).layer(1, METHODS[method].format).nbytes
    assert sum(buffer.nbytes for buffer in gpu.pinned) == stored  # no slots in DRAM


# method -> layer 0 stays on the device, 1 in DRAM: where a prompt's pass unpacks each, and what is copied of layer 1
DECODED = {
    "dense": (set(), "stored"),
    "zstd": ({("dram", 1)}, "dense"),
    "endor_cpu": ({("dram", 1)}, "dense"),
    "endor": ({("device", 1)}, "stored"),
    "endor_packed": ({("device", 0), ("device", 1)}, "stored"),  # several tokens are not multiplied packed
}


@pytest.mark.parametrize("method", METHODS)
def test_spans_tell_where_each_stage_took_place(packed, method):
    _, folder = packed("llama")
    with OffloadedModel.open(folder, method, placement=LayerMap(1, 3, 0), policy="sequential", device="cuda") as ours:
        opened = len(ours.timeline.spans)
        logits(ours.model)
        spans = ours.timeline.spans[opened:]
    decoded, copied = DECODED[method]
    assert {(span.tier, span.layer) for span in spans if span.stage == "decode" and span.layer < 2} == decoded
    assert {span.tier for span in spans if span.stage == "compute"} == {"device"}
    assert {(span.tier, span.layer) for span in spans if span.stage == "copy"} >= {("dram", 1), ("dram", 2)}
    stored = Store.open(folder).layer(1, METHODS[method].format)
    expected = {"stored": stored.nbytes, "dense": sum(run.dense_bytes for run in stored.ops.values())}
    assert sum(span.nbytes for span in spans if span.stage == "copy" and span.layer == 1) == expected[copied]


@pytest.mark.parametrize("policy", POLICIES)
def test_no_slot_is_written_before_its_last_reader_was_waited_for(packed, gpu, policy):
    _, folder = packed("llama")
    per_layer = 2 * 7  # a decode and a product for each of seven matrices
    with OffloadedModel.open(folder, placement=LayerMap(0, 0, LAYERS), policy=policy, device="cuda") as ours:
        for _ in range(2):
            logits(ours.model)
    slots: dict[int, int] = {}
    assert len({target for target, *_ in gpu.copies}) == POLICIES[policy].slots
    for number, (target, waited, _) in enumerate(gpu.copies):
        if target in slots:
            assert waited >= per_layer * (slots[target] + 1)  # the work of the layer that was there, and all before
        slots[target] = number


def test_the_next_layer_is_copied_while_this_one_is_used(packed, gpu):
    _, folder = packed("llama")
    with OffloadedModel.open(folder, placement=LayerMap(0, LAYERS, 0), device="cuda") as ours:
        copied = threading.Semaphore(0)
        gpu.before_copy = copied.release
        first, second = ours.model.model.layers[:2]
        arrived = []
        for block in (first, first, second):  # two layers before the first is done with, a third before the second is
            block.register_forward_hook(lambda *_: arrived.append(copied.acquire(timeout=30)))
        logits(ours.model)
    assert arrived == [True, True, True]
    assert {thread for *_, thread in gpu.copies} != {threading.get_ident()}


def test_direct_reads_need_no_slots_in_dram(packed, monkeypatch):
    monkeypatch.setattr(buffers, "HUGE_PAGE_BYTES", BLOCK_BYTES)
    model, folder = packed("llama")
    store = Store.open(folder)
    layer = store.layer(0, "endor").nbytes
    device_bytes = store.rest_bytes + 70 * 48 * 4 + 3 * layer  # one that stays, two slots
    how = {"dram_bytes": layer, "device_bytes": device_bytes, "device": "cuda"}
    with OffloadedModel.open(folder, "endor_packed", reader="direct", **how) as ours:
        assert ours.placement == LayerMap(1, 1, LAYERS - 2, spread=True)
        assert torch.equal(logits(ours.model), logits(model))
    with pytest.raises(UserError, match="DRAM budget"):
        OffloadedModel.open(folder, "endor_packed", **how)


@pytest.mark.parametrize(("method", "kept"), zip(METHODS, cycle([2, 0, LAYERS]), strict=False))
def test_budgets_decide_what_stays_and_are_never_exceeded(packed, gpu, method, kept):
    model, folder = packed("llama")
    where = LayerMap(kept, min(1, LAYERS - kept), max(0, LAYERS - kept - 1))
    with OffloadedModel.open(folder, method, placement=where, device="cuda") as ours:
        limits = {name: ours.budgets[name].used_bytes for name in ("dram", "device")}
        taken = dict(ours.budgets["device"].taken)
    room = sum(whole(buffer.nbytes) for buffer in gpu.device_buffers[:2]) + taken["rest"] + taken["scratch"]
    assert limits["device"] == room
    assert limits["dram"] == sum(whole(buffer.nbytes) for buffer in gpu.pinned)
    if kept:  # what is left when nothing stays is the next test's
        with OffloadedModel.open(
            folder, method, dram_bytes=max(limits["dram"], 4 << 20), device_bytes=limits["device"], device="cuda"
        ) as ours:
            assert ours.placement.device >= where.device
            assert ours.budgets["device"].used_bytes <= limits["device"]
            assert torch.equal(logits(ours.model), logits(model))


def test_without_a_budget_what_is_free_is_the_limit(packed, gpu):
    _, folder = packed("llama")
    gpu.memory_bytes = 1_000_000
    with pytest.raises(
        UserError, match=r"device budget of 0\.9 MB is too small: 2\.\d MB are needed \(scratch .* slots"
    ):
        OffloadedModel.open(folder, device="cuda")
    with pytest.raises(UserError, match=r"DRAM budget of 0\.1 MB is too small: \d\.\d MB are needed"):
        OffloadedModel.open(folder, dram_bytes=100_000, placement=MIXED, device="cuda", device_bytes=1 << 30)
    gpu.memory_bytes = 1 << 30
    with OffloadedModel.open(folder, device="cuda") as ours:
        assert ours.placement == LayerMap(LAYERS, 0, 0, spread=True)


@pytest.mark.parametrize("reader", ["threads", "direct"])
def test_a_read_that_fails_is_an_error_and_can_be_tried_again(packed, fails_at, reader):
    model, folder = packed("llama")
    with OffloadedModel.open(folder, placement=LayerMap(0, 1, LAYERS - 1), reader=reader, device="cuda") as ours:
        fails_at(2)
        with pytest.raises(OSError, match="bad sector"):
            logits(ours.model)
        assert torch.equal(logits(ours.model), logits(model))
        assert torch.equal(logits(ours.model), logits(model))

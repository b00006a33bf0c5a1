"""Layers, neurons and experts from disk alike: right after errors, interrupts and damage, within small budgets."""

import errno
import gc
import multiprocessing
import os
import re
import shutil
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.measure.test_accelerate import resident_pages
from tests.offload import test_expert_model, test_neuron_model
from tests.offload.conftest import LAYERS, opened, pruned, run_and_kill
from toolkit.errors import UserError
from toolkit.formats import FormatError
from toolkit.kernels.engine.parallel import Program
from toolkit.offload.budget import BudgetError
from toolkit.offload.placement import LayerMap
from toolkit.storage.packing import pack_model
from toolkit.storage.readers import READERS
from toolkit.timeline import Recorder

PROMPT = torch.tensor([[5, 17, 3, 44, 8, 1]])
GREEDY = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
ON_DISK = {"placement": LayerMap(0, 0, LAYERS)}
# a token in a layer: products, reads, and the share of a layer's bytes that is read; programs of compiled tasks in all
# layers. 1100 neurons come in three reads; 3 of 6 experts are used, each in one read
WAYS = {
    "layers": (7, 1, 1, 0),
    "layers, packed": (1, 1, 1, LAYERS),
    "neurons": (1 + 1, 3, 1, LAYERS + 1),  # norm and head follow the last FFN
    "experts": (1 + 3, 3, 1 / 2, LAYERS + 1),
}
TOKENS = 3
PATIENCE_S = 60  # after which a process hangs
pytestmark = pytest.mark.usefixtures("one_thread")


@dataclass
class Case:
    """A folder, the counts of a token, and the text in memory; `on_demand` are settings that keep nothing."""

    folder: Path
    counts: tuple
    expected: torch.Tensor
    settings: dict
    on_demand: dict

    def open(self, **more):
        return opened(self.folder, **self.settings | more)

    def is_right(self, ours):
        return torch.equal(ours.generate(PROMPT, **GREEDY), self.expected)


@pytest.fixture(scope="module", params=WAYS)
def case(request, tmp_path_factory):
    folder, counts = tmp_path_factory.mktemp("layouts") / "store", WAYS[request.param]
    if request.param == "neurons":
        packed = test_neuron_model.Packed("llama", folder)
        on_demand = {"predictors": [None] * LAYERS, "window": 0}
        return Case(folder, counts, packed.expected(**GREEDY), {"predictors": packed.predictors}, on_demand)
    if request.param == "experts":
        model = test_expert_model.Packed("Mixtral", folder, **test_expert_model.LARGE).model
        settings, on_demand = {}, {"look_ahead": False, "window": 0}
    else:
        model = pruned("llama")
        pack_model(model, folder)
        settings, on_demand = {"method": "endor_packed" if "packed" in request.param else "endor"}, ON_DISK
    return Case(folder, counts, model.generate(PROMPT, **GREEDY), settings, on_demand)


def test_the_bytes_that_an_error_asks_for_are_enough(case):
    with pytest.raises(BudgetError, match=r"too small: [\d.]+ MB are needed \(.*rest [\d.]+ MB") as told:
        case.open(dram_bytes=1)
    for limit in (told.value.needed_bytes, float(re.search(r"([\d.]+) MB are needed", str(told.value))[1]) * 1e6):
        with case.open(dram_bytes=limit) as ours:
            assert case.is_right(ours)
            assert ours.budgets["dram"].used_bytes <= limit
    with pytest.raises(BudgetError):
        case.open(dram_bytes=told.value.needed_bytes - 1)


@pytest.mark.parametrize("reader", ["threads", "aio"])
def test_after_a_read_error_the_model_works(case, monkeypatch, reader):
    fetch, calls = READERS[reader]._fetch, SimpleNamespace(count=0, broken=0)

    def fails_once(self, *arguments):
        calls.count += 1
        if calls.count == calls.broken:
            raise OSError(errno.EIO, "bad sector")
        fetch(self, *arguments)

    monkeypatch.setattr(READERS[reader], "_fetch", fails_once)
    for broken in (2, 9, 15):
        with case.open(reader=reader, verify=False, **case.on_demand) as ours:
            calls.count, calls.broken = 0, broken
            with pytest.raises(OSError, match="bad sector"):
                ours.generate(PROMPT, **GREEDY)
            assert calls.count >= broken
            assert case.is_right(ours)


def test_after_control_c_the_model_works(case, monkeypatch):
    """Wherever a span is recorded: in the middle of products, of bookkeeping, of a prediction."""
    record, calls = Recorder.record, SimpleNamespace(left=0)

    def stopped(self, *arguments):
        record(self, *arguments)
        if threading.current_thread() is threading.main_thread():
            calls.left -= 1
            if calls.left == 0:
                raise KeyboardInterrupt

    monkeypatch.setattr(Recorder, "record", stopped)
    for left in (1, 4, 11, 30):
        with case.open(verify=False) as ours:
            calls.left = left
            with pytest.raises(KeyboardInterrupt):
                ours.generate(PROMPT, **GREEDY)
            assert case.is_right(ours)


def test_options_that_the_layout_does_not_have_are_refused(case):
    if "method" in case.settings:
        wrong, told = {"predictors": [None] * LAYERS}, "no neurons or experts"
    else:
        wrong, told = ON_DISK, "placement=.*holds (neurons|experts), which the CPU reads and uses; leave it out"
    with pytest.raises(UserError, match=told):
        case.open(**wrong)


def test_a_killed_run_harms_nothing(case, tmp_path):
    run_and_kill(case.folder, tmp_path / "ready")
    with case.open() as ours:
        assert case.is_right(ours)


def test_a_folder_with_an_altered_bit_is_refused(case, tmp_path):
    """`tests/storage/test_store.py` has all other damage."""
    folder = tmp_path / "store"
    shutil.copytree(case.folder, folder)
    shard = max(folder.glob("*.safetensors"), key=lambda file: file.stat().st_size)
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 16
    shard.write_bytes(content)
    with pytest.raises(FormatError, match=r"^[^\n]*damaged[^\n]*$"):
        opened(folder)


def test_two_models_on_one_folder_run_at_once_and_each_for_one_thread(case):
    before = len(os.listdir("/proc/self/fd"))
    with case.open() as one, case.open() as other, ThreadPoolExecutor(2) as threads:
        assert all(threads.map(case.is_right, (one, other)))
        with one._turn.taken(), pytest.raises(UserError, match="running in another thread"):
            threads.submit(one.generate, PROMPT).result()
    for module in (one.model, one.model.model.layers[0].self_attn.q_proj):
        with pytest.raises(UserError, match="this model was closed"):
            module(PROMPT)
    assert len(os.listdir("/proc/self/fd")) == before


def test_the_page_cache_holds_no_weights(case, tmp_path):
    """Neither after packing nor after running: memory would hold them twice, beyond the budget."""
    shards = sorted(case.folder.glob("*.safetensors"))
    with case.open() as ours:  # reads all to compare checksums
        if ours.mode != "direct":
            pytest.skip("this file system knows no direct reads")
        assert case.is_right(ours)
        assert [resident_pages(file) for file in shards] == [0] * len(shards)


def test_bytes_reads_and_launches_of_a_token(case, monkeypatch):
    """Counts, so that a token that reads or launches three times as much shows on any machine."""
    run, launched = Program.run, []
    monkeypatch.setattr(Program, "run", lambda self: launched.append(1) or run(self))
    with case.open(policy="sequential", **case.on_demand) as ours, torch.no_grad():  # no read is on its way
        cache = ours.model(PROMPT, use_cache=True).past_key_values
        launched.clear()
        first = len(ours.timeline.spans)
        for token in range(TOKENS):
            ours.model(torch.tensor([[token]]), past_key_values=cache, use_cache=True)
        spans = ours.timeline.spans[first:]
        layers = [layer for variant in ours.store.variants[:1] for layer in ours.store.layers_of(variant)]
    read = [span.nbytes for span in spans if span.stage == "read"]
    products, reads, share, programs = case.counts
    assert sum(read) == TOKENS * share * sum(layer.nbytes for layer in layers)
    assert len(read) == TOKENS * LAYERS * reads
    assert sum(span.stage == "compute" for span in spans) == TOKENS * LAYERS * products
    assert len(launched) == TOKENS * programs


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_is_refused_and_can_open_for_itself(case):
    """It has none of the threads that read for its parent's model."""

    def child():
        for use in (lambda: ours.generate(PROMPT, **GREEDY), lambda: ours.model(PROMPT)):
            with pytest.raises(UserError, match=f"opened in process {os.getppid()}, which forked this one: open its"):
                use()
        ours.close()
        with case.open() as own:
            assert case.is_right(own)

    with case.open() as ours:
        assert case.is_right(ours)
        process = multiprocessing.get_context("fork").Process(target=child)
        process.start()
        process.join(PATIENCE_S)
        process.kill()
        assert process.exitcode == 0
        assert case.is_right(ours)


@pytest.mark.parametrize("at_opening", [True, False])
def test_inference_mode_at_opening_or_for_some_of_the_texts(case, at_opening):
    with torch.inference_mode(at_opening):
        ours = case.open()
    with ours:
        cache = None
        for inference in (not at_opening, at_opening, not at_opening):
            with torch.inference_mode(inference):
                assert case.is_right(ours)
            with torch.inference_mode(not inference), torch.no_grad():  # a cache of the other mode goes on
                passed = ours.model(PROMPT if cache is None else PROMPT[:, :1], past_key_values=cache)
                cache = passed.past_key_values


def used(case):
    """Weak references to the parts of a model that was opened, run and closed."""
    with case.open(verify=False) as ours:
        ours.generate(PROMPT, **GREEDY)
    return [weakref.ref(part) for part in (ours, ours.strategy, *ours.model.modules())]


def test_nothing_refers_to_what_was_closed(case, uncollected):
    """No memory, files or threads of it wait for the cycle collector."""
    used(case)  # it may compile kernels, and what compiles leaves frames to the collector
    gc.collect()
    assert [part() for part in used(case) if part() is not None] == []

"""A model that was closed is gone at once: no memory, files or threads of it wait for the cycle collector."""

import gc
import os
import resource
import threading
import weakref

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from toolkit.errors import UserError
from toolkit.offload.model import OffloadedModel
from toolkit.storage.experts import WholeExperts
from toolkit.storage.neuron_packing import Neurons
from toolkit.storage.packing import Linears, pack_model

SIZES = {"vocab_size": 8192, "hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
LLAMA = SIZES | {"intermediate_size": 512, "num_key_value_heads": 2}
PROMPT = torch.tensor([[5, 17, 3]])
OPENS = 25
LEAST_BYTES = 4 * 8192 * 256  # of the embedding, which each open model holds


def llama():
    return LlamaForCausalLM(LlamaConfig(**LLAMA))


def mixtral():
    return MixtralForCausalLM(MixtralConfig(**LLAMA, num_local_experts=4))


WAYS = {
    "decoded": (llama, Linears(), {"method": "endor"}),
    "packed": (llama, Linears(), {"method": "endor_packed"}),
    "neurons": (llama, Neurons(), {}),
    "experts": (mixtral, WholeExperts(), {}),
}


@pytest.fixture
def use(tmp_path):
    """`use(way)` opens, runs and closes a model; it returns weak references to its parts."""
    torch.manual_seed(0)

    def once(way):
        make, layout, options = WAYS[way]
        if not (tmp_path / way).exists():
            pack_model(make().eval().requires_grad_(False), tmp_path / way, layout)
        with OffloadedModel.open(tmp_path / way, verify=False, **options) as model:
            model.generate(PROMPT, max_new_tokens=3, do_sample=False, pad_token_id=0)
        return [weakref.ref(part) for part in (model, model.strategy, *model.model.modules())]

    return once


@pytest.fixture
def collected():
    """Nothing is collected in the test."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def resident_bytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("way", WAYS)
def test_nothing_refers_to_what_was_closed(use, collected, way):
    use(way)  # it may compile kernels, and what compiles leaves frames to the collector
    gc.collect()
    assert [part() for part in use(way) if part() is not None] == []


def test_many_opens_leave_no_memory_files_or_threads(use, collected, one_thread):
    use("packed")
    before = resident_bytes(), len(os.listdir("/proc/self/fd")), threading.active_count()
    for _ in range(OPENS):
        use("packed")
    after = resident_bytes(), len(os.listdir("/proc/self/fd")), threading.active_count()
    assert after[0] - before[0] < OPENS * LEAST_BYTES / 8
    assert after[1:] == before[1:]


def test_too_few_descriptors_are_one_line(use, tmp_path):
    use("packed")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        with pytest.raises(UserError, match="too many files are open; raise the limit with ulimit -n"):
            OffloadedModel.open(tmp_path / "packed", "endor_packed")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

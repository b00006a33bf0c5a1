"""A model that is opened, run and closed leaves the process as it was, whatever the process has set."""

import gc
import logging
import os
import random
import signal
import warnings
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch.utils import _device
from transformers.utils import logging as transformers_logging

from tests.models.test_experts import mixtures
from tests.offload.conftest import FAMILIES, pruned
from toolkit import hub
from toolkit.offload.model import OffloadedModel
from toolkit.storage.experts import WholeExperts
from toolkit.storage.neuron_packing import Neurons
from toolkit.storage.packing import Linears, pack_model

PROMPT = torch.tensor([[5, 17, 3, 44, 8, 1]])
GREEDY = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
THREADS = 8


def small(family, dtype=torch.float32):
    """Two layers."""
    model, config, sizes = FAMILIES[family]
    return pruned((model, config, sizes | {"num_hidden_layers": 2}), dtype)


KINDS = {
    "packed": (lambda: small("llama"), Linears(("endor",)), "endor_packed"),
    "bfloat16": (lambda: small("qwen3", torch.bfloat16), Linears(("endor",)), "endor"),
    "by neuron": (lambda: small("llama"), Neurons(), None),
    "by expert": (lambda: mixtures("Mixtral", sliding_window=None), WholeExperts(), None),
}
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Each kind's folder and method, and the text of the model in memory."""
    found = {}
    for kind, (make, layout, method) in KINDS.items():
        model, folder = make(), tmp_path_factory.mktemp("state") / "packed"
        pack_model(model, folder, layout, "tiny")
        found[kind] = folder, method, model.generate(PROMPT, **GREEDY)
    return found


def process():
    """The state of process and thread that could be left changed."""
    modules = [torch.nn.init, torch.nn.modules.linear, torch.nn.modules.activation]
    functions = [(module.__name__, name, it) for module in modules for name, it in vars(module).items() if callable(it)]
    return {
        "torch": (torch.get_default_dtype(), torch.get_default_device(), torch.get_num_threads()),
        "mode": (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), _device.CURRENT_DEVICE),
        "random": (torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()),  # noqa: NPY002
        "environment": dict(os.environ),
        "warnings": list(warnings.filters),
        "levels": {name: it.level for name, it in logging.root.manager.loggerDict.items() if hasattr(it, "level")},
        "bars": transformers_logging.is_progress_bar_enabled(),
        "signals": [signal.getsignal(number) for number in signal.valid_signals()],
        "collector": gc.isenabled(),
        "functions": functions,
    }


@pytest.fixture(params=[torch.float32, torch.bfloat16, torch.float64], ids=str)
def default_type(request):
    """torch's default type, as a caller may set it."""
    torch.set_default_dtype(request.param)
    yield request.param
    torch.set_default_dtype(torch.float32)


MODES = {torch.float32: torch.enable_grad, torch.bfloat16: torch.inference_mode, torch.float64: torch.no_grad}


def test_threads_that_open_run_and_close_at_once(folders, default_type):
    mode = MODES[default_type]

    def text(kind):
        folder, method, expected = folders[kind]
        with mode(), OffloadedModel.open(folder, method) as model:
            return kind, torch.equal(model.generate(PROMPT, **GREEDY), expected)

    list(map(text, folders))  # what is imported and compiled at first use is no state
    before = process()
    with ThreadPoolExecutor(THREADS) as pool:
        found = list(pool.map(text, [*folders] * 2))
    assert [kind for kind, same in found if not same] == []
    after = process()
    assert [name for name in before if before[name] != after[name]] == []


def test_changes_that_overlap_are_undone_by_the_last():
    before = process()
    first, second = hub.quiet(), hub.quiet()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert logging.getLogger("transformers").level == logging.ERROR
    second.__exit__(None, None, None)
    assert process() == before

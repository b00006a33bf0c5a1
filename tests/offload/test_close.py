"""Models that are opened and closed again and again; `test_layouts` looks for what still refers to a closed one."""

import os
import resource
import threading

import pytest
import torch

from tests.offload.conftest import FAMILIES, pruned
from toolkit.errors import UserError
from toolkit.offload.model import OffloadedModel
from toolkit.storage.packing import pack_model

SIZES = {"vocab_size": 8192, "hidden_size": 256, "num_hidden_layers": 2, "intermediate_size": 512}
PROMPT = torch.tensor([[5, 17, 3]])
OPENS = 25
LEAST_BYTES = 4 * 8192 * 256  # of the embedding, which each open model holds


@pytest.fixture
def use(tmp_path):
    """Open, run and close a model."""
    model, config, sizes = FAMILIES["llama"]
    pack_model(pruned((model, config, sizes | SIZES)), tmp_path / "packed")

    def once():
        with OffloadedModel.open(tmp_path / "packed", "endor_packed", verify=False) as opened:
            opened.generate(PROMPT, max_new_tokens=3, do_sample=False, pad_token_id=0)

    return once


def resident_bytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_many_opens_leave_no_memory_files_or_threads(use, uncollected, one_thread):
    use()
    before = resident_bytes(), len(os.listdir("/proc/self/fd")), threading.active_count()
    for _ in range(OPENS):
        use()
    after = resident_bytes(), len(os.listdir("/proc/self/fd")), threading.active_count()
    assert after[0] - before[0] < OPENS * LEAST_BYTES / 8
    assert after[1:] == before[1:]


def test_too_few_descriptors_are_one_line(use, tmp_path):
    use()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        with pytest.raises(UserError, match="too many files are open; raise the limit with ulimit -n"):
            OffloadedModel.open(tmp_path / "packed", "endor_packed")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

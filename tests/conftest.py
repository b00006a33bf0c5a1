"""Annotations of tensors are contracts: under the tests they are checked at every call."""

import contextlib
import errno
import gc
import os

import pytest
import torch

from tests import contracts
from toolkit import hub

# not `formats` and `storage`: they check at run time, and compiled functions take no checker
CHECKED = (
    "activations",
    "evaluation",
    "machines",
    "measure",
    "models",
    "offload",
    "policies",
    "pruning",
    "quantization",
    "simulation",
    "text",
)

# files that take more than 2 seconds of CPU time, the dearest first: `--fast` leaves them out, a whole run begins with
# them, since a worker that begins a long one last leaves the other without work
SLOW = """
sweep/sweep kernels/cuda offload/families kernels/products kernels/neuron_records tests/command_line tests/benchmarks
offload/expert_model kernels/spqr hostile/hostile kernels/bitmap offload/neuron_model evidence/report kernels/neurons
offload/draft offload/close offload/model evidence/schema papers/endor recovery/embedded
kernels/bitmap_cuda offload/hot_neurons tests/explorers kernels/parallel offload/uploader studies/expert_race
papers/corm_latency papers/endor_passes tests/starts evidence/tables kernels/spqr_cuda offload/spqr papers/operations
kernels/neurons_cuda offload/int8 tests/wheel papers/replay sweep/explorers planner/neurons papers/load_rule sweep/lab
evidence/run kernels/compiled kernels/csr kernels/single_token offload/new_format papers/spqr_forward
kernels/neuron_records_cuda offload/single_token recovery/distillation quality/tasks formats/contract
formats/contents formats/formats formats/spqr interchange/gguf costs/disk measure/race models/gguf models/models
offload/logit_check measure/side_by_side costs/neuron_tokens costs/experts policies/mapping
policies/residencies predictors/files predictors/kinds sparsity/changed sparsity/prune quantization/smoothquant
quantization/spqr costs/hot_cold storage/index storage/readers storage/store quality/text
"""
PLACES = {name: place for place, name in enumerate(SLOW.split())}

gc.disable()  # until all tests are imported, which makes millions of objects that stay
collection = contextlib.ExitStack()
collection.enter_context(hub.lean("hqq"))  # which compiles when transformers imports it
os.environ["TOOLKIT_PROGRESS"] = "0"  # bars have tests of their own
contracts.check(f"toolkit.{name}" for name in CHECKED)


def pytest_addoption(parser):
    """`./run_tests.sh --fast` for the time between two edits."""
    parser.addoption("--fast", action="store_true", help="leave out the files that take longest (tests/conftest.py)")


def pytest_ignore_collect(collection_path, config):
    """Whether `--fast` leaves a file out; None leaves the question to others."""
    if not config.getoption("--fast"):
        return None
    return _name(collection_path) in PLACES or None


def pytest_collection_modifyitems(items):
    """The dearest files begin first."""
    items.sort(key=lambda item: PLACES.get(_name(item.path), len(PLACES)))


def _name(file):
    return f"{file.parent.name}/{file.stem.removeprefix('test_')}"


def pytest_collection_finish():
    """No collection of garbage looks through what was imported again."""
    collection.close()
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def _kept_kernels():
    """Workers and later runs share compiled kernels, also where a test has a cache of its own."""
    from toolkit.kernels.engine import compiled

    compiled._folder()


@pytest.fixture
def o_direct(monkeypatch):
    """Replaces what the file system does with O_DIRECT: `o_direct("refused")` or `o_direct("ignored")`."""
    really_open = os.open

    def answer(kind):
        def fake(path, flags, *rest, **named):
            if flags & os.O_DIRECT and kind == "refused":
                raise OSError(errno.EINVAL, "Invalid argument", path)
            return really_open(path, flags & ~os.O_DIRECT, *rest, **named)

        monkeypatch.setattr(os, "open", fake)

    return answer


@pytest.fixture
def one_thread():
    """Tiny models only wait for their threads, most of all on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def _undisturbed(monkeypatch):
    """Turns are never taken again for what else the machine does."""
    from toolkit.measure import disturbance

    monkeypatch.setattr(disturbance, "load_between", lambda start, end: disturbance.Load(0.0, 0.0))

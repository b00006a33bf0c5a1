"""Annotations of tensors are contracts: under the tests they are checked at every call."""

import contextlib
import errno
import gc
import os
import sys
from importlib.util import find_spec

import pytest

from tests import contracts
from toolkit import hub, paths

# not `formats` and `storage`: they check at run time, and compiled functions take no checker
CHECKED = ("absmax", "machines", "measure", "models", "offload", "quality", "quantization", "residency", "sparsity")

# files that take more than 2 seconds of CPU time, the dearest first: `--fast` leaves them out, a whole run begins with
# them, since a worker that begins a long one last leaves the other without work. While one worker compiles the kernels
# of the products, the other has files that compile none, so that few are compiled twice
SLOW = """
kernels/products sweep/sweep kernels/cuda formats/ggml quantization/spqr tests/benchmarks offload/families
offload/layouts offload/block_by_block kernels/ptx offload/model offload/neuron_model tests/starts tests/command_line
tests/foreign_files offload/gguf_readers endor/endor models/embedded offload/draft offload/hot_neurons
hostile/hostile offload/expert_model corm/expert_race tests/explorers offload/cache_operations quality/tasks
offload/kv_types measure/race kernels/attention models/models offload/head offload/uploader endor/endor_passes
offload/quantised offload/decoder_draft kernels/compiled offload/single_token evidence/report tests/wheel
residency/policies offload/gguf_file offload/decoder kernels/parallel offload/process_state offload/logit_check
kernels/bitmap corm/corm planner/plan planner/sizes evidence/run predictors/kinds planner/neurons sparsity/prune
planner/bench spqr/spqr_forward hermes/hot_cold hermes/dimms formats/spqr offload/batches endor/operations offload/close
tests/serve kernels/neurons kernels/csr kernels/spqr kernels/single_token formats/contract formats/contents
formats/formats formats/sparse_bitmask models/gguf_header measure/llama_cpp measure/processes evidence/tables
interchange/gguf storage/store tests/extending tests/chat offload/smallest offload/new_format offload/cached_model
"""
PLACES = {name: place for place, name in enumerate(SLOW.split())}

sys.path.append(str(paths.root() / "benchmarks"))  # as the scripts there find their helpers
gc.disable()  # until all tests are imported, which makes millions of objects that stay
collection = contextlib.ExitStack()
collection.enter_context(hub.lean("hqq"))  # which compiles when transformers imports it
os.environ["TOOLKIT_PROGRESS"] = "0"  # bars have tests of their own
assert all(find_spec(f"toolkit.{name}") for name in CHECKED)
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
    """No collection of garbage looks through what was imported again, and fewer look through what is compiled."""
    collection.close()
    gc.freeze()
    gc.set_threshold(100_000, 50, 100)
    gc.enable()


def pytest_unconfigure():
    """Also in the process that only hands tests out, which collects none."""
    collection.close()


@pytest.fixture(scope="session", autouse=True)
def _kept_kernels():
    """Workers and later runs share compiled kernels, also where a test has a cache of its own."""
    from toolkit.kernels.engine import compiled

    compiled._folder()


@pytest.fixture(scope="session", autouse=True)
def _no_wait_for_the_disk():
    """Files of the toolkit need not outlive a power cut here. Tests of that put an `os.fsync` of their own."""
    really_sync = os.fsync

    def sync(file):
        if sys._getframe(1).f_globals["__name__"] not in ("toolkit.files", "toolkit.storage.shards"):
            really_sync(file)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", sync)
        yield


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
    import torch  # not above: the process that hands tests out needs none

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def _undisturbed(monkeypatch):
    """Turns are never taken again for what else the machine does, nor wait until that can be told."""
    from toolkit.measure import disturbance

    monkeypatch.setattr(disturbance, "WINDOW_S", 0.0)
    monkeypatch.setattr(disturbance, "load_between", lambda start, end: disturbance.Load(0.0, 0.0))

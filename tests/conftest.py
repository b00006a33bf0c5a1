"""Annotations of tensors are contracts: under the tests they are checked at every call."""

import errno
import gc
import os

import pytest
import torch

from tests import contracts

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

# what `--fast` leaves out: files that take more than 2 seconds of CPU time
SLOW = {
    ".": "benchmarks command_line explorers extending repeatable starts wheel",
    "evaluation": "tasks",
    "evidence": "reference report run schema",
    "formats": "contract files formats spqr",
    "hostile": "hostile",
    "interchange": "gguf",
    "kernels": "ahead bitmap bitmap_cuda compiled csr cuda neuron_records neurons neurons_cuda program spqr spqr_cuda",
    "machines": "disk",
    "measure": "race",
    "models": "gguf models",
    "offload": "close draft expert_model families hot_neurons int8 model neuron_model new_format single_token spqr"
    " uploader",
    "papers": "endor endor_passes operations replay spqr_forward",
    "policies": "mapping residencies",
    "predictors": "files kinds",
    "pruning": "prune",
    "quantization": "quantised smoothquant spqr",
    "recovery": "adapters distillation embedded",
    "simulation": "hot_cold",
    "storage": "index readers store",
    "sweep": "lab state sweep",
    "text": "text",
}

gc.disable()  # until all tests are imported, which makes millions of objects that stay
os.environ["TOOLKIT_PROGRESS"] = "0"  # bars have tests of their own
contracts.check(f"toolkit.{name}" for name in CHECKED)


def pytest_addoption(parser):
    """`./run_tests.sh --fast` for the time between two edits."""
    parser.addoption("--fast", action="store_true", help="leave out the files that take longest (tests/conftest.py)")


def pytest_ignore_collect(collection_path, config):
    """Whether `--fast` leaves a file out; None leaves the question to others."""
    if not config.getoption("--fast"):
        return None
    folder = "." if collection_path.parent.name == "tests" else collection_path.parent.name
    return collection_path.stem.removeprefix("test_") in SLOW.get(folder, "").split() or None


def pytest_collection_modifyitems(items):
    """Sweeps take minutes, so they begin first: a worker that begins one last leaves the other without work."""
    items.sort(key=lambda item: item.path.parent.name != "sweep")


def pytest_collection_finish():
    """No collection of garbage looks through them again."""
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def _kept_kernels():
    """Workers and later runs share compiled kernels, also where a test has a cache of its own."""
    from toolkit.kernels.runtime import compiled

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

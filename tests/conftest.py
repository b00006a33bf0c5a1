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

gc.disable()  # until all tests are imported, which makes millions of objects that stay
os.environ["TOOLKIT_PROGRESS"] = "0"  # bars have tests of their own
contracts.check(f"toolkit.{name}" for name in CHECKED)


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

"""The memory of a process in groups that play Linux's, by hand."""

from types import SimpleNamespace

import psutil
import pytest

from toolkit import files, memory_limits
from toolkit.errors import UserError
from toolkit.memory_limits import free_bytes, total_bytes
from toolkit.offload.device import Cpu

GB = 10**9
UNLIMITED = {"1": "9223372036854771712", "2": "max"}
SYSTEM = {  # lines of mountinfo and of cgroup; TOP stands for the mounted folder
    "1": ("35 31 0:32 / TOP rw - cgroup cgroup rw,memory", "4:memory:/batch/job\n0::/"),
    "2": ("35 31 0:32 / TOP rw - cgroup2 cgroup2 rw", "0::/batch/job"),
}
FILES = {
    "1": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_active_file {}\ntotal_inactive_file {}\ncache 1"),
    "2": ("memory.max", "memory.current", "anon 1\nactive_file {}\ninactive_file {}"),
}


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    """One of 64 GB, of which 50 are free."""
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=64 * GB, available=50 * GB))


@pytest.fixture(params=["1", "2"], ids=["version 1", "version 2"])
def groups(request, tmp_path, monkeypatch):
    """A function that fills a group: its limit, its usage, and pages of files, active and not."""
    version, top, proc = request.param, tmp_path / "groups", tmp_path / "proc"
    (proc / "self").mkdir(parents=True)
    (top / "batch" / "job").mkdir(parents=True)
    (top / "cgroup.controllers").write_text("cpu memory")
    for name, text in zip(("mountinfo", "cgroup"), SYSTEM[version], strict=True):
        (proc / "self" / name).write_text(text.replace("TOP", str(top)) + "\n")
    monkeypatch.setattr(memory_limits, "PROC", proc)

    def fill(group, limit, used, active=0, inactive=0):
        names = (*FILES[version][:2], "memory.stat")
        texts = (UNLIMITED[version] if limit is None else limit, used, FILES[version][2].format(active, inactive))
        for name, text in zip(names, texts, strict=True):
            (top / group / name).write_text(f"{text}\n")

    fill.folder, fill.version = top, version
    return fill


def test_without_groups_it_is_the_machines(tmp_path, monkeypatch):
    monkeypatch.setattr(memory_limits, "PROC", tmp_path)
    assert (total_bytes(), free_bytes()) == (64 * GB, 50 * GB)


def test_the_smallest_limit_of_nested_groups_counts(groups):
    groups("batch/job", None, 5 * GB)
    groups("batch", 16 * GB, 10 * GB, active=2 * GB, inactive=3 * GB)
    assert total_bytes() == 16 * GB
    assert free_bytes() == 16 * GB - (10 - 5) * GB
    groups("batch/job", 4 * GB, 1 * GB)
    assert (total_bytes(), free_bytes()) == (4 * GB, 3 * GB)
    assert Cpu().free_bytes == 3 * GB


def test_groups_that_cannot_be_read_are_left_out(groups):
    groups("batch", 8 * GB, 1 * GB)
    (groups.folder / "batch" / "job" / FILES[groups.version][0]).write_text("no number")
    assert (total_bytes(), free_bytes()) == (8 * GB, 7 * GB)


def test_what_does_not_fit_the_limit_is_refused(groups):
    groups("batch/job", 4 * GB, 1 * GB)
    with pytest.raises(UserError, match=r"the model takes 3\.5 GB of memory and 3\.0 GB are free"):
        files.check_memory(3_500_000_000, "the model")
    files.check_memory(2 * GB, "the model")

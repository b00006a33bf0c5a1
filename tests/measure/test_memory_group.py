import mmap
import os
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest

from tests.measure.test_accelerate import resident_pages
from toolkit import memory_limits
from toolkit.errors import UserError
from toolkit.measure import memory_group
from toolkit.measure.memory_group import MemoryGroup, missing
from toolkit.memory_limits import V1, V2
from toolkit.storage.direct import drop_pages

STATISTICS = {V1: "cache 700\nrss 200\ntotal_cache 9", V2: "anon 200\nfile 700\nkernel 100"}
SYSTEM = {  # lines of mountinfo and of cgroup, where TOP stands for the mounted folder
    V1: ("35 31 0:32 / TOP rw - cgroup cgroup rw,memory", "4:memory:/batch/job\n0::/"),
    V2: ("35 31 0:32 / TOP rw - cgroup2 cgroup2 rw", "0::/batch/job"),
}


class System:
    """A folder that plays Linux's: the kernel fills new groups with files, and removes those without processes."""

    def __init__(self, folder, version, monkeypatch):
        self.version, self.top, self.proc = version, folder / "groups", folder / "proc"
        self.parent = self.top
        (self.proc / "self").mkdir(parents=True)
        mounts, own = SYSTEM[version]
        (self.proc / "self" / "mountinfo").write_text(mounts.replace("TOP", str(self.top)) + "\n")
        (self.proc / "self" / "cgroup").write_text(own + "\n")
        for group in (self.top, self.top / "batch", self.top / "batch" / "job"):
            self.make(group)
        monkeypatch.setattr(memory_limits, "PROC", self.proc)
        self.os = SimpleNamespace(**vars(os) | {"mkdir": self.make, "rmdir": self.remove})
        monkeypatch.setattr(memory_group, "os", self.os)

    def make(self, group):
        os.makedirs(group)
        files = {self.version.limits[0]: "max", self.version.usage: "1000", "memory.stat": STATISTICS[self.version]}
        files |= {
            memory_group.PROCESSES: "",
            "cgroup.subtree_control": "cpu memory",
            "cgroup.controllers": "cpu memory",
        }
        for name, text in files.items():
            (group / name).write_text(text)

    def remove(self, group):
        if (group / memory_group.PROCESSES).read_text():
            raise OSError(16, "Device or resource busy")
        shutil.rmtree(group)

    def groups(self):
        return sorted(path.name for path in self.top.rglob(f"{memory_group.NAME}-*"))


@pytest.fixture(params=[V1, V2], ids=["version 1", "version 2"])
def system(request, tmp_path, monkeypatch):
    return System(tmp_path, request.param, monkeypatch)


def test_a_group_has_a_process_and_a_limit(system):
    assert missing() is None
    with pytest.raises(RuntimeError), MemoryGroup():
        raise RuntimeError
    assert system.groups() == []
    with MemoryGroup() as group:
        assert group.folder.parent == system.top
        group.add(123)
        group.limit(5000)
        assert (group.folder / memory_group.PROCESSES).read_text() == "123"
        assert (group.folder / system.version.limits[0]).read_text() == "5000"
        assert group.other_bytes == 1000 - 700
        (group.folder / memory_group.PROCESSES).write_text("")  # it ends
    assert system.groups() == []


def test_groups_of_processes_that_ended_are_removed(system):
    system.make(system.top / f"{memory_group.NAME}-77-0")
    system.make(system.top / f"{memory_group.NAME}-88-0")
    (system.proc / "88").mkdir()
    busy = system.top / f"{memory_group.NAME}-99-0"
    system.make(busy)
    (busy / memory_group.PROCESSES).write_text("100")
    with MemoryGroup():
        assert len(system.groups()) == 3
    assert system.groups() == [f"{memory_group.NAME}-88-0", f"{memory_group.NAME}-99-0"]


def test_a_user_without_rights_takes_a_group_that_is_delegated(system):
    system.os.access = lambda path, _: "job" in str(path).removeprefix(str(system.top))
    with MemoryGroup() as group:
        assert group.folder.parent == system.top / "batch" / "job"
    system.os.access = lambda *_: False
    assert "expected root or a delegated group" in missing()
    with pytest.raises(UserError, match="expected root"):
        MemoryGroup()


def test_a_system_without_the_controller_says_so(system):
    (system.proc / "self" / "mountinfo").write_text("41 31 0:38 / / rw - ext4 /dev/vda rw\n")
    assert "no memory cgroups" in missing()


def test_a_container_that_sees_a_part_of_the_tree(tmp_path, monkeypatch):
    system = System(tmp_path, V1, monkeypatch)
    (system.proc / "self" / "mountinfo").write_text(f"35 31 0:32 /batch {system.top} rw - cgroup cgroup rw,memory\n")
    shutil.move(system.top / "batch" / "job", system.top / "job")
    system.os.access = lambda path, _: "job" in str(path).removeprefix(str(system.top))
    with MemoryGroup() as group:
        assert group.folder.parent == system.top / "job"


TOUCHING = """
import mmap, sys
sys.stdin.readline()
with open(sys.argv[1], "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as pages:
    print(sum(pages[:: mmap.PAGESIZE]), flush=True)
    sys.stdin.readline()
"""


@pytest.mark.skipif(missing() is not None, reason=str(missing()))
def test_a_process_in_a_group_keeps_no_more_pages_than_its_limit(tmp_path):
    file, limit = tmp_path / "pages", 32 << 20
    with open(file, "wb") as stream:
        stream.write(bytes(3 * limit))
        stream.flush()
        os.fsync(stream.fileno())
    drop_pages(file)
    if resident_pages(file):
        pytest.skip("this file system keeps its pages")
    command, pipes = [sys.executable, "-c", TOUCHING, file], {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with MemoryGroup() as group, subprocess.Popen(command, text=True, **pipes) as process:
        group.add(process.pid)
        group.limit(limit)
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline() == "0\n"
        assert resident_pages(file) * mmap.PAGESIZE <= limit
        assert group.other_bytes < limit
        process.communicate("\n")
    assert not group.folder.exists()

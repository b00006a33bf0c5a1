"""A limit of memory for a process and for its pages of files: a memory cgroup of Linux, version 1 or 2.

    if missing() is None:
        with MemoryGroup() as group:
            group.add(process.pid)
            group.limit(group.other_bytes + weights_bytes)

A page of a file counts for the group of the process that touches it first. So pages that are in the page cache before
the process starts cost it nothing: drop them first. (Linux: Documentation/admin-guide/cgroup-v1/memory.rst,
cgroup-v2.rst.)
"""

import contextlib
import itertools
import os
from pathlib import Path

from toolkit import memory_limits
from toolkit.errors import UserError

NAME = "toolkit-memory"  # of groups: NAME-PROCESS-NUMBER
PROCESSES = "cgroup.procs"

_numbers = itertools.count()


def missing() -> str | None:
    """Why this process can make no memory cgroup, or None if it can."""
    try:
        _parent()
    except UserError as error:
        return str(error)
    return None


class MemoryGroup(contextlib.AbstractContextManager):
    """A memory cgroup without processes and without a limit. It does not swap.

    Groups that processes left behind when they were killed are removed first. Raises `UserError` where none can be
    made, and `OSError` for what the system refuses later.
    """

    def __init__(self):
        parent, self._version = _parent()
        for stale in parent.glob(f"{NAME}-*"):
            if not (memory_limits.PROC / stale.name.split("-")[-2]).exists():
                with contextlib.suppress(OSError):  # a process is in it
                    os.rmdir(stale)
        self.folder = parent / f"{NAME}-{os.getpid()}-{next(_numbers)}"
        os.mkdir(self.folder)
        with contextlib.suppress(OSError):  # a system without swap may lack the file
            self._write(self._version.swap, "0")

    def add(self, process: int) -> None:
        """Put a process into the group, by its id. Memory that it has already stays with its old group."""
        self._write(PROCESSES, str(process))

    def limit(self, nbytes: int) -> None:
        """Limit memory and pages of files together to so many bytes. Pages above the limit are dropped at once."""
        self._write(self._version.limits[0], str(nbytes))

    @property
    def other_bytes(self) -> int:
        """The bytes in memory that are of no file: heaps, caches, buffers, and the kernel's page tables for them."""
        pages = memory_limits.statistics(self.folder)[self._version.pages]
        return int((self.folder / self._version.usage).read_text()) - pages

    def close(self) -> None:
        """Remove the group. Its processes must have ended."""
        with contextlib.suppress(FileNotFoundError):
            os.rmdir(self.folder)

    def __exit__(self, *_: object) -> None:
        """Remove it."""
        self.close()

    def _write(self, name: str, value: str) -> None:
        with open(self.folder / name, "r+") as file:
            file.write(value)


def _parent() -> tuple[Path, memory_limits.Version]:
    """The topmost group in which this process may make groups with a limit of memory, and its version."""
    found = list(memory_limits.hierarchies())
    places = [(group, version) for version, top, own in found for group in memory_limits.groups_above(top, own)]
    if not places:
        raise UserError("this system has no memory cgroups: expected Linux with the memory controller")
    for group, version in places:
        control = group / "cgroup.subtree_control"
        handed_on = version is memory_limits.V1 or (control.exists() and "memory" in control.read_text().split())
        if handed_on and all(os.access(path, os.W_OK) for path in (group, group / PROCESSES)):
            return group, version
    tops = ", ".join(str(top) for _, top, _ in found)
    raise UserError(f"this process may not make a memory cgroup in {tops}: expected root or a delegated group")

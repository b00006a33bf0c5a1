"""A limit of memory for a process and for its pages of files: a memory cgroup of Linux, version 1 or 2.

    if missing() is None:
        with MemoryGroup() as group:
            group.add(process.pid)
            group.limit(group.other_bytes + weights_bytes)

A page of a file counts for the group of the process that touches it first, so pages that are in the page cache before
the process starts are free for it: drop them first. (Linux: Documentation/admin-guide/cgroup-v1/memory.rst,
cgroup-v2.rst.)
"""

import contextlib
import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from toolkit.errors import UserError

PROC = Path("/proc")
NAME = "toolkit-memory"  # of groups: NAME-PROCESS-NUMBER
PROCESSES = "cgroup.procs"

_numbers = itertools.count()


@dataclass(frozen=True)
class Version:
    """The names of a version's files, and of the pages of files in its `memory.stat`."""

    limit: str
    usage: str
    swap: str
    pages: str


V1 = Version("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.swappiness", "cache")
V2 = Version("memory.max", "memory.current", "memory.swap.max", "file")


def missing() -> str | None:
    """Why this process can make no memory cgroup, or None if it can."""
    try:
        _parent()
    except UserError as error:
        return str(error)
    return None


class MemoryGroup:
    """A memory cgroup without processes and without a limit. It does not swap.

    Groups that processes left behind when they were killed are removed first. Raises `UserError` where none can be
    made, and `OSError` for what the system refuses later.
    """

    def __init__(self):
        parent, self._version = _parent()
        for stale in parent.glob(f"{NAME}-*"):
            if not (PROC / stale.name.split("-")[-2]).exists():
                with contextlib.suppress(OSError):  # a process is in it
                    os.rmdir(stale)
        self.folder = parent / f"{NAME}-{os.getpid()}-{next(_numbers)}"
        os.mkdir(self.folder)
        with contextlib.suppress(OSError):  # a system without swap may lack the file
            self._write(self._version.swap, "0")

    def add(self, process: int) -> None:
        """Put a process into the group, by its id. What it has in memory already stays with its old group."""
        self._write(PROCESSES, str(process))

    def limit(self, nbytes: int) -> None:
        """Let all memory and pages of files take so many bytes together. Pages above it are dropped at once."""
        self._write(self._version.limit, str(nbytes))

    @property
    def other_bytes(self) -> int:
        """The bytes in memory that are of no file: heaps, caches, buffers, and the kernel's page tables for them."""
        lines = (self.folder / "memory.stat").read_text().splitlines()
        pages = next(int(value) for name, value in map(str.split, lines) if name == self._version.pages)
        return int((self.folder / self._version.usage).read_text()) - pages

    def close(self) -> None:
        """Remove the group. Its processes must have ended."""
        with contextlib.suppress(FileNotFoundError):
            os.rmdir(self.folder)

    def __enter__(self) -> "MemoryGroup":
        """The group."""
        return self

    def __exit__(self, *_: object) -> None:
        """Remove it."""
        self.close()

    def _write(self, name: str, value: str) -> None:
        with open(self.folder / name, "r+") as file:
            file.write(value)


def _parent() -> tuple[Path, Version]:
    """The topmost group in which this process may make groups with a limit of memory, and its version."""
    places = [(group, version) for version, top, own in _mounts() for group in _way(top, own)]
    if not places:
        raise UserError("this system has no memory cgroups: expected Linux with the memory controller")
    for group, version in places:
        control = group / "cgroup.subtree_control"
        handed_on = version is V1 or (control.exists() and "memory" in control.read_text().split())
        if handed_on and all(os.access(path, os.W_OK) for path in (group, group / PROCESSES)):
            return group, version
    tops = ", ".join(str(top) for _, top, _ in _mounts())
    raise UserError(f"this process may not make a memory cgroup in {tops}: expected root or a delegated group")


def _way(top: Path, own: Path) -> list[Path]:
    """The groups from the topmost one down to the process's own."""
    steps = own.parts
    return [group for end in range(len(steps) + 1) if (group := top.joinpath(*steps[:end])).is_dir()]


def _mounts() -> Iterator[tuple[Version, Path, Path]]:
    """Hierarchies with a memory controller: version, topmost visible group, and the path of this process's below it."""
    files = [PROC / "self" / name for name in ("mountinfo", "cgroup")]
    if not all(file.exists() for file in files):
        return
    mounts, groups = (file.read_text().splitlines() for file in files)
    own = {controllers: path for _, controllers, path in (line.split(":", 2) for line in groups)}
    for line in mounts:
        before, _, after = line.partition(" - ")
        (root, folder), (kind, _, options) = before.split()[3:5], after.split()[:3]
        if kind == "cgroup" and "memory" in options.split(","):
            path = next((path for names, path in own.items() if "memory" in names.split(",")), "/")
            yield V1, Path(folder), _below(path, root)
        if kind == "cgroup2":
            controllers = Path(folder) / "cgroup.controllers"
            if controllers.exists() and "memory" in controllers.read_text().split():
                yield V2, Path(folder), _below(own.get("", "/"), root)


def _below(path: str, root: str) -> Path:
    """A group's path, relative to the one that is mounted."""
    return Path(path).relative_to(root) if Path(path).is_relative_to(root) else Path()

"""The memory that this process may use: the machine's, or less where a container or a batch job has a limit.

    total_bytes()   # as much as it can ever have
    free_bytes()    # as much as it can take now without swapping
    anonymous_bytes()  # what it has that is of no file, and so cannot be dropped

Linux gives both for the machine in /proc/meminfo, which leaves limits out. The groups are memory cgroups of version 1
or 2, the process's own and all above it. (Linux: Documentation/admin-guide/cgroup-v1/memory.rst, cgroup-v2.rst.)
"""

import contextlib
import ctypes
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from numbers import Real
from pathlib import Path

from toolkit.errors import UserError

PROC = Path("/proc")
STATISTICS = "memory.stat"
UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
LARGE = 128 << 10


@dataclass(frozen=True)
class Version:
    """The names of a version's files, and of pages of files in its `memory.stat`: all, and those that can be dropped.

    In version 1 the lines count that include the groups below, as its limit and its usage do.
    """

    limits: tuple[str, ...]
    usage: str
    swap: str
    pages: str
    droppable: tuple[str, str]


V1 = Version(
    ("memory.limit_in_bytes",),
    "memory.usage_in_bytes",
    "memory.swappiness",
    "cache",
    ("total_active_file", "total_inactive_file"),
)
# above memory.high a group is slowed down until it is below
V2 = Version(
    ("memory.max", "memory.high"), "memory.current", "memory.swap.max", "file", ("active_file", "inactive_file")
)


def bytes_of(name: str, size: float | str | None) -> int | None:
    """A size in bytes: a number, or words such as "500MB" or "1.5GiB", in letters of any case. None stays None.

    Raises `UserError` for anything else. It names the option or parameter, `name`.
    """
    if size is None:
        return None
    if isinstance(size, str) and (parts := re.fullmatch(r"(\d{1,18}(?:\.\d{1,18})?) ?([KMGT]I?B|)", size.upper())):
        return round(float(parts[1]) * UNITS[parts[2]])
    if isinstance(size, Real) and not isinstance(size, bool) and 0 <= size < float("inf"):
        return int(size)
    raise UserError(f"{name} {size!s:.99}: expected a size such as 500MB or 1.5GiB")


def total_bytes() -> int:
    """Memory of the machine, or the smallest limit of this process's groups."""
    import psutil

    return min([psutil.virtual_memory().total, *(limit for limit, _ in _limits())])


def free_bytes() -> int:
    """Memory that this process can still take without swapping: pages of files that can be dropped count as free."""
    import psutil

    return max(0, min([psutil.virtual_memory().available, *(limit - used for limit, used in _limits())]))


def anonymous_bytes(process: int | None = None) -> int:
    """Memory of this process, or of one by its id, that belongs to no file.

    Where the system does not tell, all its memory.
    """
    import psutil

    try:
        lines = (PROC / str(process or "self") / "status").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon:"))
    except (OSError, StopIteration):
        return psutil.Process(process).memory_info().rss


def trim() -> None:
    """Give the system back the freed memory that glibc's allocator keeps for later. Elsewhere nothing happens.

    It keeps what lies below memory in use, so a process that opens large models again and again would grow.
    """
    with contextlib.suppress(AttributeError, OSError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


def return_large_blocks(nbytes: int = LARGE) -> None:
    """Have glibc give each block of so many bytes back when it is freed. By itself it keeps up to 32 MB, in many heaps.

    A prompt of 1,500 tokens takes 60 MB of SmolLM2 then, and up to 300 otherwise. The system clears each page of a
    block anew: where blocks come and go all the time, larger ones alone should be given back.
    """
    malloc = {-1: nbytes, -3: nbytes, -8: 1}  # malloc.h: M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX
    with contextlib.suppress(AttributeError, OSError):  # another C library
        for name, value in malloc.items():
            ctypes.CDLL(None).mallopt(name, value)


class Peak(contextlib.AbstractContextManager):
    """The largest `anonymous_bytes` while the block runs, as `nbytes`, looked at 20 times a second."""

    PERIOD_S = 0.05

    def __init__(self):
        self.nbytes, self._end = anonymous_bytes(), threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def look(self) -> int:
        """Look now; the largest so far."""
        self.nbytes = max(self.nbytes, anonymous_bytes())
        return self.nbytes

    def __enter__(self) -> "Peak":
        """Begin to watch."""
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop."""
        self._end.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._end.wait(self.PERIOD_S):
            self.look()


def hierarchies() -> Iterator[tuple[Version, Path, Path]]:
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


def groups_above(top: Path, own: Path) -> list[Path]:
    """The groups from the topmost one down to the process's own."""
    steps = own.parts
    return [group for end in range(len(steps) + 1) if (group := top.joinpath(*steps[:end])).is_dir()]


def statistics(group: Path) -> dict[str, int]:
    """The lines of a group's `memory.stat`. Raises `OSError`."""
    lines = (group / STATISTICS).read_text().splitlines()
    return {name: int(value) for name, value in map(str.split, lines)}


def _limits() -> Iterator[tuple[int, int]]:
    """Limit and used bytes of each group that has a limit and can be read."""
    for version, top, own in hierarchies():
        for group in groups_above(top, own):
            with contextlib.suppress(OSError, ValueError, KeyError):  # the root group has no such files
                limits = [(group / name).read_text().strip() for name in version.limits if (group / name).exists()]
                numbers = [int(limit) for limit in limits if limit != "max"]
                if numbers:
                    found = statistics(group)
                    used = int((group / version.usage).read_text()) - sum(found[name] for name in version.droppable)
                    yield min(numbers), max(0, used)


def _below(path: str, root: str) -> Path:
    """A group's path, relative to the one that is mounted."""
    return Path(path).relative_to(root) if Path(path).is_relative_to(root) else Path()

"""The state of each job in a small file of its own. `execute` writes it; the driver and the report read it."""

import os
import socket
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import get_type_hints

import psutil

from toolkit import paths
from toolkit.files import make_folder, read_json, remove_leftovers, write_json


@dataclass(frozen=True)
class State:
    """The last known state of a job. `status` is running, done or failed. The start time guards against reused pids."""

    id: str
    status: str
    started: float
    seconds: float | None = None
    peak_memory_bytes: int | None = None
    error: str | None = None
    host: str = ""
    pid: int = 0
    process_started: float = 0.0

    def save(self) -> None:
        """Replace what was known of this job."""
        file = _file(self.id)
        make_folder(file.parent)
        write_json(file, asdict(self))


TYPES = get_type_hints(State)


def folder() -> Path:
    """The sweep's own files: plan, states, logs."""
    return paths.results_dir() / ".sweep"


def failed_page(id: str) -> Path:
    """Where the executed notebook of a failed job is kept, for the report."""
    return folder() / "failed" / f"{_flat(id)}.ipynb"


def load(id: str) -> State | None:
    """The last known state of a job. None if there is none, or its file is not one that `State.save` wrote."""
    return _sound(read_json(_file(id)))


def this_process() -> dict[str, object]:
    """The fields of `State` that identify the running process."""
    return {"host": socket.gethostname(), "pid": os.getpid(), "process_started": psutil.Process().create_time()}


def stop_leftovers() -> None:
    """End the processes that a killed sweep left on this machine, and remove its unfinished results."""
    for file in folder().glob("state/*.json"):
        found = read_json(file)
        if found.get("status") == "running" and found.get("host") == socket.gethostname():
            if (last := _sound(found)) is not None:
                _end(last.pid, last.process_started)
            file.unlink(missing_ok=True)
    for paper in folder().parent.iterdir():
        if paper.is_dir():
            remove_leftovers(paper)


def is_alive(pid: int, process_started: float) -> bool:
    """Whether that process still runs, and not another one with the same pid."""
    try:
        return abs(psutil.Process(pid).create_time() - process_started) < 0.5
    except psutil.NoSuchProcess:
        return False


def _sound(found: dict) -> State | None:
    """A state file's content, if it has the fields of a `State`, each of its type."""
    sound = found.keys() == TYPES.keys() and all(isinstance(found[name], type) for name, type in TYPES.items())
    return State(**found) if sound else None


def _end(pid: int, process_started: float) -> None:
    if not is_alive(pid, process_started):
        return
    process = psutil.Process(pid)
    family = [process, *process.children(recursive=True)]
    for member in family:
        try:
            member.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(family, timeout=10)


def _file(id: str) -> Path:
    return folder() / "state" / f"{_flat(id)}.json"


def _flat(id: str) -> str:
    return id.replace("/", "__")

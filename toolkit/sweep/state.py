"""The state of each job in a small file of its own. `execute` writes it; the driver and the report read it."""

import contextlib
import os
import socket
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import psutil

from toolkit import paths
from toolkit.files import make_folder, read_json, remove_leftovers, write_json

KILLED = "its process was killed (too little memory?) or could not write its state; see .sweep/snakemake.log"


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

    def killed(self) -> "State":
        """The state of a running job whose process ended without a word."""
        return replace(self, status="failed", error=KILLED)


def folder() -> Path:
    """The sweep's own files: plan, states, logs."""
    return paths.results_dir() / ".sweep"


def failed_page(id: str) -> Path:
    """Where the executed notebook of a failed job is kept, for the report."""
    return folder() / "failed" / f"{_flat(id)}.ipynb"


def load(id: str) -> State | None:
    """The last known state of a job; None if there is none.

    A job that was running and whose process is gone has failed: it was killed before it could say so.
    """
    last = _read(id)
    ours = last is not None and last.status == "running" and last.host == socket.gethostname()
    if not ours or is_alive(last.pid, last.process_started):
        return last
    ended = _read(id)  # in case it ended well just now
    return ended.killed() if ended and ended.status == "running" else ended


def this_process() -> dict[str, object]:
    """The fields of `State` that identify the running process."""
    return {"host": socket.gethostname(), "pid": os.getpid(), "process_started": psutil.Process().create_time()}


def remove_unfinished() -> None:
    """Forget the jobs of a killed sweep on this machine, which end with their driver, and remove their results."""
    for file in folder().glob("state/*.json"):
        last = read_json(file)
        if last.get("status") == "running" and last.get("host") == socket.gethostname():
            file.unlink(missing_ok=True)
    remove_scratch()


def remove_scratch() -> None:
    """Remove the unfinished results of jobs that run no more."""
    results = folder().parent
    for place in (*results.glob("*/"), *results.glob("*/*/")):  # of notebooks, and of notebooks at points of a grid
        with contextlib.suppress(FileNotFoundError):  # a Snakemake that is about to end removed it
            remove_leftovers(place)


def is_alive(pid: int, process_started: float) -> bool:
    """Whether that process still runs, and not another one with the same pid."""
    try:
        return abs(psutil.Process(pid).create_time() - process_started) < 0.5
    except psutil.Error:  # it has ended
        return False


def _read(id: str) -> State | None:
    with contextlib.suppress(TypeError):  # no file, or one of another version of the toolkit
        return State(**read_json(_file(id)))
    return None


def _file(id: str) -> Path:
    return folder() / "state" / f"{_flat(id)}.json"


def _flat(id: str) -> str:
    return id.replace("/", "__")

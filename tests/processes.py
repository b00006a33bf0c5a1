"""Processes that begin with what is slow to import: a fresh interpreter takes seconds for that, and a fork none."""

import multiprocessing
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

from toolkit import paths

# forks come from a server without threads, as no fork of this process could be
FRESH = multiprocessing.get_context("forkserver")
FRESH.set_forkserver_preload(["toolkit.offload.model", "transformers.models.llama"])


def start(code: str) -> BaseProcess:
    """Run code in a process of its own, which can import `tests`."""
    process = FRESH.Process(target=exec, args=(f"import sys; sys.path.insert(0, {str(paths.root())!r})\n{code}", {}))
    process.start()
    return process


def ended(code: str) -> int:
    """The exit status of such a process; below zero, the signal that ended it."""
    process = start(code)
    process.join()
    return process.exitcode


def wait_for(file: Path, process: BaseProcess) -> None:
    """Wait until a process has written a file."""
    while not file.exists():
        assert process.is_alive(), "it ended before"
        time.sleep(0.01)

"""The toolkit's command line as a whole process in a memory cgroup without swap: how it ends, its memory, its words."""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from toolkit.measure.llama_cpp_process import KILLED
from toolkit.measure.memory_group import MemoryGroup

SKIPPED = 77  # the status where no cgroup can be made
PERIOD_S = 0.05


@dataclass(frozen=True)
class Ended:
    """An ended process. `peak_bytes`: what the cgroup counts beside pages of files, 20 times a second.

    `stopped`: whether it was killed from here.
    """

    status: int
    peak_bytes: int
    said: str
    stopped: bool

    @property
    def killed(self) -> bool:
        """Whether a signal ended it."""
        return self.status in KILLED

    @property
    def last_line(self) -> str:
        """The last line it said."""
        return (self.said.strip().splitlines() or [""])[-1]


def run_limited(
    words: Sequence[str], limit_bytes: int, quiet: bool = False, stops: Callable[[], bool] = lambda: False
) -> Ended:
    """Run `sparse-offload` with these words; kill it as soon as `stops` says so. If `quiet`, stdout is not kept."""
    peak, stopped = 0, False
    with MemoryGroup() as group, tempfile.TemporaryFile("w+") as said:
        group.limit(limit_bytes)
        command = [sys.executable, "-P", "-m", "toolkit", *words]
        out = subprocess.DEVNULL if quiet else said
        process = subprocess.Popen(command, preexec_fn=lambda: group.add(os.getpid()), stdout=out, stderr=said)
        while process.poll() is None:
            peak = max(peak, group.other_bytes)
            if stops():
                process.kill()
                stopped = True
            time.sleep(PERIOD_S)
        said.seek(0)
        return Ended(process.returncode, peak, said.read(), stopped)

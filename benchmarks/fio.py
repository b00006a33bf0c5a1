"""What the storage benchmarks share: running fio as fairly as we run and a file to read."""

import json
import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from toolkit.machines.disk import WRITE_BYTES
from toolkit.storage.buffers import HUGE_PAGE_BYTES

SKIPPED = 77  # the exit status of a benchmark that cannot run here
REST_S = 0.2  # before each reading of ours: fio takes as long to start, and a disk in the cloud is faster after a rest


def missing() -> bool:
    """Whether fio is not installed; says so if it is."""
    if shutil.which("fio"):
        return False
    print("skipped: fio is not installed (Debian, Ubuntu: apt-get install fio)")
    return True


def read_gb_s(path: Path, mode: str, words: Mapping[str, object], huge: bool = True) -> float:
    """Bandwidth of one run of fio that reads a file, in GB/s, start-up not counted.

    `words` are fio's options (rw, bs, numjobs, ioengine, ...), `mode` the one that our own reads really are in; `huge`
    has it read into huge pages, as we do.
    """
    words = {"name": "read", "filename": str(path), "direct": int(mode == "direct"), "randrepeat": 0} | dict(words)
    environment = dict(os.environ)
    if huge:
        environment["GLIBC_TUNABLES"] = "glibc.malloc.hugetlb=1"
        words["iomem_align"] = HUGE_PAGE_BYTES
    flags = ["--readonly", "--thread", "--group_reporting", "--output-format=json"]
    command = ["fio", *flags, *(f"--{name}={value}" for name, value in words.items())]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    return json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]["read"]["bw_bytes"] / 1e9


def write_file(path: Path, size_bytes: int) -> None:
    """Random bytes, on the disk."""
    generator = np.random.default_rng(0)
    with open(path, "wb") as stream:
        for start in range(0, size_bytes, WRITE_BYTES):
            stream.write(generator.bytes(min(WRITE_BYTES, size_bytes - start)))
        stream.flush()
        os.fsync(stream.fileno())

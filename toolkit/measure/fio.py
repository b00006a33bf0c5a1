"""fio, the usual tool for measuring disks, on a file of ours: a yardstick for our reader, where it is installed."""

import json
import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from toolkit.storage.buffers import HUGE_PAGE_BYTES

FLAGS = ("--readonly", "--thread", "--group_reporting", "--output-format=json", "--name=read", "--randrepeat=0")


def installed() -> bool:
    """Whether fio can be called."""
    return shutil.which("fio") is not None


def read_gb_s(file: Path, mode: str, words: Mapping[str, object], huge: bool = True) -> float:
    """GB/s of one run of fio that reads a file, start-up not counted.

    `words` are fio's options (rw, bs, numjobs, ioengine, ...), `mode` the one that our own reads really are in; `huge`
    has it read into huge pages, as we do.
    """
    words = {"filename": file, "direct": int(mode == "direct")} | dict(words)
    environment = dict(os.environ)
    if huge:
        environment["GLIBC_TUNABLES"] = "glibc.malloc.hugetlb=1"
        words["iomem_align"] = HUGE_PAGE_BYTES
    command = ["fio", *FLAGS, *(f"--{name}={value}" for name, value in words.items())]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    return json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]["read"]["bw_bytes"] / 1e9

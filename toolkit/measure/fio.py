"""fio, the usual tool for measuring disks, on a file of ours: a yardstick for our reader, where it is installed."""

import json
import os
import shutil
import subprocess
from pathlib import Path

from toolkit.storage.buffers import HUGE_PAGE_BYTES
from toolkit.storage.readers import Reader

FLAGS = ("--readonly", "--thread", "--group_reporting", "--output-format=json", "--name=read", "--randrepeat=0")


def installed() -> bool:
    """Whether fio can be called."""
    return shutil.which("fio") is not None


def random_read_gb_s(file: Path, like: Reader, chunk_bytes: int, depth: int, seconds: float) -> float:
    """GB/s of random reads of a file into huge pages, so many under way at once.

    It reads in the mode of our reader `like`, and by the same interface: asynchronous I/O, or threads that each wait
    for one chunk.
    """
    words = {"filename": file, "rw": "randread", "bs": chunk_bytes, "direct": int(like.mode == "direct")}
    words |= {"ioengine": "libaio", "iodepth": depth} if like.name == "aio" else {"ioengine": "psync", "numjobs": depth}
    words |= {"iomem_align": HUGE_PAGE_BYTES}
    words |= {"time_based": 1, "runtime": f"{seconds * 1000:.0f}ms"}
    command = ["fio", *FLAGS, *(f"--{name}={value}" for name, value in words.items())]
    huge = os.environ | {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=huge)
    return json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]["read"]["bw_bytes"] / 1e9

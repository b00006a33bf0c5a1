"""Parts that the storage benchmarks share: whether fio is there, a rest before each reading, and a file to read."""

import os
from pathlib import Path

import numpy as np

from toolkit.machines.disk import WRITE_BYTES
from toolkit.measure.fio import installed

SKIPPED = 77  # the exit status of a benchmark that cannot run here
REST_S = 0.2  # before each reading of ours: fio takes as long to start, and a disk in the cloud is faster after a rest


def missing() -> bool:
    """Whether fio is not installed; says so if it is."""
    if installed():
        return False
    print("skipped: fio is not installed (Debian, Ubuntu: apt-get install fio)")
    return True


def write_file(path: Path, size_bytes: int) -> None:
    """Random bytes, on the disk."""
    generator = np.random.default_rng(0)
    with open(path, "wb") as stream:
        for start in range(0, size_bytes, WRITE_BYTES):
            stream.write(generator.bytes(min(WRITE_BYTES, size_bytes - start)))
        stream.flush()
        os.fsync(stream.fileno())

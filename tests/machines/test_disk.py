import errno
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from toolkit.errors import UserError
from toolkit.machines import disk

SIZE = 1 << 20


@pytest.mark.parametrize("pattern", disk.PATTERNS)
def test_a_file_is_read_for_the_time_asked(tmp_path, pattern):
    with disk.scratch_file(tmp_path, SIZE) as file:
        reading = disk.read(file, pattern, 1 << 16, threads=2, seconds=0.05)
    assert reading.bytes > 0
    assert reading.bytes % (1 << 16) == 0
    assert reading.gb_s > 0
    if file.mode == "direct":  # no thread stops before its time
        assert reading.gb_s <= reading.bytes / 0.05 / 1e9


def test_the_files_bytes_cannot_be_compressed(tmp_path):
    with disk.scratch_file(tmp_path, SIZE) as file:
        content = np.frombuffer(Path(f"/proc/self/fd/{file.descriptor}").read_bytes(), np.uint8)
    assert len(content) == SIZE
    assert np.bincount(content, minlength=256).min() > SIZE / 256 * 0.8


@pytest.mark.parametrize("kind", ["refused", "ignored"])
def test_a_file_system_without_direct_reads_is_labelled_buffered(tmp_path, o_direct, kind):
    o_direct(kind)
    with disk.scratch_file(tmp_path, SIZE) as file:
        assert file.mode == "buffered"
        assert disk.read(file, "random", 4096, threads=3, seconds=5).bytes == SIZE  # once through, then it stops


def test_a_disk_that_fills_up_meanwhile(tmp_path, monkeypatch):
    def full(descriptor, content):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    descriptors = os.listdir("/proc/self/fd")
    with pytest.raises(UserError, match=rf"{tmp_path}: no space left"), disk.scratch_file(tmp_path, SIZE):
        pass
    assert os.listdir(tmp_path) == []
    assert os.listdir("/proc/self/fd") == descriptors


def test_a_read_that_fails_or_falls_short_is_an_error(tmp_path):
    with disk.scratch_file(tmp_path, SIZE) as file:
        with pytest.raises(OSError, match="short read: 0 of 65536 bytes"):
            disk.read(replace(file, size_bytes=4 * SIZE), "sequential", 1 << 16, threads=4, seconds=0.2)
        with pytest.raises(OSError, match="Bad file descriptor"):
            disk.read(replace(file, descriptor=-1), "random", 4096, threads=4, seconds=0.01)

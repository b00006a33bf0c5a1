"""Linux's asynchronous I/O: what happens after a failure or when signals come, and where the system refuses it."""

import errno
import itertools
import os
import signal
import subprocess
import sys

import numpy as np
import pytest

from tests.storage.conftest import Part
from toolkit.errors import UserError
from toolkit.kernels import reads as asynchronous
from toolkit.storage.buffers import aligned_buffer
from toolkit.storage.chunks import in_line
from toolkit.storage.direct import BLOCK_BYTES
from toolkit.storage.readers import READERS, open_reader

RANGES = [Part("a", 4096, 30 * BLOCK_BYTES), Part("c", 0, 64 * BLOCK_BYTES), Part("a", 0, 0), Part("b", 0, 4096)]


def expected(stored):
    """Plain slices of the files."""
    return b"".join(stored[r.shard].path.read_bytes()[r.offset : r.offset + r.nbytes] for r in RANGES)


def loop(failing):
    """The compiled loop of "aio" in Python, which reads backwards. It starts no more reads than the depth."""

    def read_many(context, depth, descriptor, offsets, sizes, places, target, results, requests):
        for index in reversed(range(min(depth, len(sizes)))):
            part = memoryview(target)[places[index] : places[index] + sizes[index]]
            results[index] = failing() or os.preadv(descriptor, [part], offsets[index])

    return read_many


def test_after_a_failure_no_more_reads_are_started(stored):
    """The first range lies beyond the end of the file: of the 60 others only those under way are read."""
    with READERS["aio"](stored, depth=2) as reader:
        offsets = np.arange(61) * BLOCK_BYTES
        offsets[0] = 1 << 40
        target, results = aligned_buffer(61 * BLOCK_BYTES), np.full(61, -99)
        sizes, places = np.full(61, BLOCK_BYTES), np.arange(61) * BLOCK_BYTES
        given = (reader._descriptor("c"), offsets, sizes, places, target, results)
        asynchronous.read_many(reader._context, 2, *given, np.zeros((61, asynchronous.REQUEST_WORDS), np.int64))
    assert results[0] == 0
    assert (results == -99).sum() >= 40
    assert set(results[1:]) == {-99, BLOCK_BYTES}


OVERWRITTEN = """
import sys
from pathlib import Path
import numpy as np
from toolkit.storage.buffers import aligned_buffer
from toolkit.storage.chunks import Chunks
from toolkit.storage.direct import BLOCK_BYTES, StoredFile
from toolkit.storage.readers import READERS
places = np.arange(64) * BLOCK_BYTES
with READERS["aio"]({"c": StoredFile.of(Path(sys.argv[1]))}, depth=8) as reader:
    chunks = Chunks("c", places, np.full(64, BLOCK_BYTES), places)
    print(set(reader._read_many(reader._descriptor("c"), chunks, aligned_buffer(64 * BLOCK_BYTES)).tolist()))
"""


def test_requests_stay_until_the_system_has_read_them(stored):
    """Also where the C library overwrites what is freed: the system has nothing but their address."""
    command = [sys.executable, "-P", "-c", OVERWRITTEN, str(stored["c"].path)]
    ended = subprocess.run(command, env=os.environ | {"MALLOC_PERTURB_": "165"}, capture_output=True, text=True)
    assert ended.stdout.strip() == str({BLOCK_BYTES}), ended.stderr


def test_signals_interrupt_nothing(stored):
    wanted, heard = expected(stored), []
    before = signal.signal(signal.SIGALRM, lambda *_: heard.append(1))
    signal.setitimer(signal.ITIMER_REAL, 1e-3, 1e-4)
    try:
        with READERS["aio"](stored, chunk_bytes=BLOCK_BYTES, depth=3) as reader:
            while len(heard) < 20:
                target = aligned_buffer(95 * BLOCK_BYTES)
                reader.read(in_line(RANGES), target)
                assert target.tobytes() == wanted
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize(("number", "reason"), [(-1, "unknown processor"), (1 << 20, os.strerror(errno.ENOSYS))])
def test_where_the_system_refuses_it_threads_read(stored, monkeypatch, number, reason):
    monkeypatch.setattr(asynchronous, "SETUP", number)
    with pytest.raises(UserError, match=f"{reason}.*use reader 'threads'"):
        READERS["aio"](stored)
    store = type("Store", (), {"files": lambda self, *variants: stored})()
    with open_reader(None, store, depth=3) as reader:
        assert (reader.name, reader.depth) == ("threads", 3)


def test_what_failed_once_or_was_not_started_is_read_again(stored, monkeypatch):
    calls = itertools.count()
    monkeypatch.setattr(asynchronous, "read_many", loop(lambda: -errno.EINTR if next(calls) % 3 == 0 else None))
    target = aligned_buffer(95 * BLOCK_BYTES)
    for depth in (1, 2, 7):
        target[:] = 0
        with READERS["aio"](stored, chunk_bytes=2 * BLOCK_BYTES, depth=depth) as reader:
            reader.read(in_line(RANGES), target)
        assert target.tobytes() == expected(stored)


def test_a_read_that_fails_again_is_raised_with_its_reason(stored, monkeypatch):
    calls = itertools.count(1)
    monkeypatch.setattr(asynchronous, "read_many", loop(lambda: next(calls) and -errno.EIO))

    def broken(descriptor, buffers, offset):
        raise OSError(errno.EIO, "Input/output error")

    with READERS["aio"](stored, chunk_bytes=2 * BLOCK_BYTES, depth=4) as reader:
        monkeypatch.setattr(os, "preadv", broken)
        with pytest.raises(OSError, match="Input/output error"):
            reader.read(in_line(RANGES), aligned_buffer(95 * BLOCK_BYTES))
    assert next(calls) <= 1 + 4  # after a failure no more reads are started

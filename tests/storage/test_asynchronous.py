"""Asynchronous readers on stand-ins for what they call: some reads fail, and some are not started."""

import errno
import itertools
import os
import sys

import pytest

from tests.storage.conftest import Part, expected
from toolkit.kernels.reads import asynchronous
from toolkit.storage.buffers import aligned_buffer
from toolkit.storage.direct import BLOCK_BYTES
from toolkit.storage.readers import READERS

RANGES = [Part("a", 4096, 30 * BLOCK_BYTES), Part("c", 0, 64 * BLOCK_BYTES), Part("a", 0, 0), Part("b", 0, 4096)]


def loop(failing):
    """The compiled loop of "aio" in Python, which reads backwards. It starts no more reads than the depth."""

    def read_many(context, depth, descriptor, offsets, sizes, places, target, results):
        for index in reversed(range(min(depth, len(sizes)))):
            part = memoryview(target)[places[index] : places[index] + sizes[index]]
            results[index] = failing() or os.preadv(descriptor, [part], offsets[index])

    return read_many


def ring(failing):
    """`uring_api.Ring` in Python, which completes half of its reads at a time, in any order."""

    class Ring:
        def __init__(self, depth):
            self.depth, self.prepared, self.flying = depth, [], []

        def construct_read(self, descriptor, part, offset, user_data):
            return descriptor, part, offset, user_data

        def prepare(self, read):
            self.prepared.append(read)

        def submit(self):
            self.flying += self.prepared
            self.prepared = []
            assert len(self.flying) <= self.depth

        def wait(self):
            assert self.flying, "would wait for ever"
            done = []
            for descriptor, part, offset, user_data in self.flying[: len(self.flying) // 2 : -1] or [self.flying[-1]]:
                result = failing() or os.preadv(descriptor, [part], offset)
                done.append(type("Completion", (), {"res": result, "user_data": user_data}))
            self.flying = self.flying[: -len(done)]
            return done

        def __enter__(self):
            return self

        def __exit__(self, *error):
            assert not self.flying

    return Ring


@pytest.fixture(params=["aio", "io_uring"])
def stand_in(request, monkeypatch):
    """`stand_in(failing)` gives the reader's name; a read fails with the number that `failing()` returns, if any."""

    def install(failing):
        if request.param == "aio":
            monkeypatch.setattr(asynchronous, "read_many", loop(failing))
        else:
            monkeypatch.setitem(sys.modules, "uring_api", type(sys)("uring_api"))
            sys.modules["uring_api"].Ring = ring(failing)
        return request.param

    return install


def test_what_failed_once_or_was_not_started_is_read_again(stored, stand_in):
    calls = itertools.count()
    name = stand_in(lambda: -errno.EINTR if next(calls) % 3 == 0 else None)
    target = aligned_buffer(95 * BLOCK_BYTES)
    for depth in (1, 2, 7):
        target[:] = 0
        with READERS[name](stored, chunk_bytes=2 * BLOCK_BYTES, depth=depth) as reader:
            reader.read(RANGES, target)
        assert target.tobytes() == expected(stored, RANGES)


def test_a_read_that_fails_again_is_raised_with_its_reason(stored, stand_in, monkeypatch):
    calls = itertools.count(1)
    name = stand_in(lambda: next(calls) and -errno.EIO)

    def broken(descriptor, buffers, offset):
        raise OSError(errno.EIO, "Input/output error")

    with READERS[name](stored, chunk_bytes=2 * BLOCK_BYTES, depth=4) as reader:
        monkeypatch.setattr(os, "preadv", broken)
        with pytest.raises(OSError, match="Input/output error"):
            reader.read(RANGES, aligned_buffer(95 * BLOCK_BYTES))
    assert next(calls) <= 1 + 4  # after a failure no more reads are started

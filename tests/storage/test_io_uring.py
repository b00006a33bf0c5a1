"""The io_uring reader on a stand-in for its package: what happens when reads fail, and where io_uring cannot be had."""

import errno
import os
import sys

import pytest

from tests.storage.conftest import Part, expected
from toolkit.errors import UserError
from toolkit.storage.buffers import aligned_buffer
from toolkit.storage.direct import BLOCK_BYTES
from toolkit.storage.readers import READERS, open_reader


class FakeRing:
    """`uring_api.Ring` in Python: completes in any order, and says of every third read that it failed."""

    def __init__(self, depth):
        self.depth, self.prepared, self.flying, self.count = depth, [], [], 0

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
            self.count += 1
            result = -errno.EINTR if self.count % 3 == 0 else os.preadv(descriptor, [part], offset)
            done.append(type("Completion", (), {"res": result, "user_data": user_data}))
        self.flying = self.flying[: -len(done)]
        return done

    def __enter__(self):
        return self

    def __exit__(self, *error):
        assert not self.flying


def test_io_uring_reads_again_what_failed_once(stored, monkeypatch):
    monkeypatch.setitem(sys.modules, "uring_api", type(sys)("uring_api"))
    sys.modules["uring_api"].Ring = FakeRing
    ranges = [Part("a", 4096, 30 * BLOCK_BYTES), Part("c", 0, 64 * BLOCK_BYTES), Part("a", 0, 0), Part("b", 0, 4096)]
    target = aligned_buffer(95 * BLOCK_BYTES)
    for depth in (1, 2, 7):
        target[:] = 0
        with READERS["io_uring"](stored, chunk_bytes=2 * BLOCK_BYTES, depth=depth) as reader:
            reader.read(ranges, target)
        assert target.tobytes() == expected(stored, ranges)


def test_io_uring_without_its_package(store, monkeypatch):
    monkeypatch.setitem(sys.modules, "uring_api", None)
    with pytest.raises(UserError, match="needs the package uring-api: pip install"):
        open_reader("io_uring", store)


def test_io_uring_that_a_container_refuses(store, monkeypatch):
    def refused(depth):
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setitem(sys.modules, "uring_api", type(sys)("uring_api"))
    sys.modules["uring_api"].Ring = refused
    with pytest.raises(UserError, match=r"this kernel or container refuses io_uring .*Operation not permitted"):
        open_reader("io_uring", store)

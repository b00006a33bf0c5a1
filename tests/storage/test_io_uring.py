"""Where io_uring cannot be had."""

import errno
import sys

import pytest

from toolkit.errors import UserError
from toolkit.storage.readers import open_reader


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

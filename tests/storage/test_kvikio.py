"""The KvikIO reader on a stand-in for KvikIO: no GPU is needed to see what it asks for and what it calls itself."""

import contextlib
import itertools
import os
import sys

import numpy as np
import pytest
import torch

from toolkit.errors import UserError
from toolkit.storage.buffers import aligned_buffer
from toolkit.storage.chunks import in_line
from toolkit.storage.direct import BLOCK_BYTES, ChangedError, StoredFile
from toolkit.storage.readers import READERS, open_reader


class DeviceMemory:
    """The interface of a CUDA tensor, in host memory."""

    is_cuda = True

    def __init__(self, array):
        self.array = array
        self.nbytes = array.nbytes

    def data_ptr(self):
        return self.array.ctypes.data

    def __getitem__(self, part):
        return DeviceMemory(self.array[part])


class FakeFile:
    """KvikIO's file handle: `pread` gives a future whose `get` tells the bytes read."""

    short = 0

    def __init__(self, path, flags):
        assert flags == "r"
        self.stream = open(path, "rb")  # noqa: SIM115

    def fileno(self):
        return self.stream.fileno()

    def pread(self, buf, size=None, file_offset=0, task_size=None):
        assert file_offset % BLOCK_BYTES == size % BLOCK_BYTES == task_size % BLOCK_BYTES == 0
        done = os.preadv(self.fileno(), [memoryview(buf.array)], file_offset) - self.short
        assert buf.nbytes == size
        return type("Future", (), {"get": lambda self: done})()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.stream.close()


@pytest.fixture
def kvikio(monkeypatch):
    """`kvikio(posix, nvidia_fs, allow_compat)` puts a KvikIO in place that finds the machine so."""
    state = {"settings": [], "opened": 0}

    def install(posix=False, nvidia_fs=True, allow_compat=False):
        module, defaults, driver = (type(sys)(name) for name in ("kvikio", "kvikio.defaults", "kvikio.cufile_driver"))
        found = {"is_gds_available": nvidia_fs, "allow_compat_mode": allow_compat}

        def get(name):
            assert state["opened"] == 1, "cuFile tells defaults while its driver is closed"
            return found[name]

        @contextlib.contextmanager
        def set_(settings):
            state["settings"].append(settings)
            yield
            state["settings"].pop()

        defaults.set, defaults.is_compat_mode_preferred = set_, lambda: posix
        driver.get = get
        driver.driver_open = lambda: state.update(opened=state["opened"] + 1)
        driver.driver_close = lambda: state.update(opened=state["opened"] - 1)
        module.CuFile, module.defaults, module.cufile_driver = FakeFile, defaults, driver
        for name, part in {"": module, ".defaults": defaults, ".cufile_driver": driver}.items():
            monkeypatch.setitem(sys.modules, "kvikio" + name, part)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        return state

    return install


@pytest.fixture
def stored(tmp_path):
    (tmp_path / "a").write_bytes(np.random.default_rng(0).bytes(5 * BLOCK_BYTES))
    return {"a": StoredFile.of(tmp_path / "a")}


def test_only_what_cannot_fall_back_is_called_gds(kvikio, stored):
    for posix, nvidia_fs, allow_compat in itertools.product([False, True], repeat=3):
        state = kvikio(
            posix, nvidia_fs, allow_compat
        )  # where compatibility is allowed, any file may fall back silently
        with READERS["kvikio"](stored, depth=3) as reader:
            assert reader.mode == ("gds" if nvidia_fs and not (posix or allow_compat) else "compat")
            assert state["settings"] == [{"num_threads": 3, "gds_threshold": 0}]
        assert state == {"settings": [], "opened": 0}


def test_layers_are_read_into_device_memory(kvikio, store):
    kvikio()
    layer = store.layer(1, "csr")
    run = layer.ops["mlp.up"]
    content = (store.folder / layer.shard).read_bytes()
    target = DeviceMemory(aligned_buffer(layer.nbytes + run.nbytes))
    with open_reader("kvikio", store, "csr") as reader:
        reader.read(in_line([layer, run]), target)
    assert target.array.tobytes() == content[layer.offset :] + content[run.offset : run.offset + run.nbytes]


def test_short_and_changed_files(kvikio, stored, monkeypatch):
    kvikio()
    target = DeviceMemory(aligned_buffer(5 * BLOCK_BYTES))
    part = type("Part", (), {"shard": "a", "offset": 0, "nbytes": 5 * BLOCK_BYTES})
    with READERS["kvikio"](stored) as reader:
        monkeypatch.setattr(FakeFile, "short", 1)
        with pytest.raises(OSError, match="short read: 20479 of 20480 bytes at offset 0"):
            reader.read(in_line([part]), target)
        os.truncate(stored["a"].path, 4096)
        with pytest.raises(ChangedError):
            reader.read(in_line([part]), target)
    with pytest.raises(ChangedError):
        READERS["kvikio"](stored)


def test_host_memory_a_missing_gpu_or_package_are_refused(kvikio, store, stored, monkeypatch):
    kvikio()
    with READERS["kvikio"](stored) as reader:
        for target in (aligned_buffer(BLOCK_BYTES), torch.zeros(BLOCK_BYTES, dtype=torch.uint8)):
            with pytest.raises(UserError, match="expected a CUDA tensor"):
                reader.submit([], target)
    monkeypatch.setitem(sys.modules, "kvikio", None)
    with pytest.raises(UserError, match="needs the package kvikio-cu12 or kvikio-cu13"):
        open_reader("kvikio", store)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match="needs a CUDA device"):
        open_reader("kvikio", store)

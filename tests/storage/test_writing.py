"""A store appears whole or not at all, whatever happens while it is written."""

import errno
import os
import shutil
import weakref
from collections import namedtuple

import pytest
import torch

from tests.storage.conftest import make_ops, names, sparse
from toolkit.errors import UserError
from toolkit.formats import encode
from toolkit.storage import shards, writing
from toolkit.storage.store import Store
from toolkit.storage.unfinished import Unfinished
from toolkit.storage.writing import Op, write_layers, write_store


def test_the_same_input_gives_the_same_bytes(tmp_path):
    for name in "ab":
        write_store(tmp_path / name, make_ops(), [("norm", torch.ones(3))], {"name": "x"})
    for path in (tmp_path / "a").iterdir():
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes()


def test_the_rest_is_cut_into_shards(tmp_path, monkeypatch):
    monkeypatch.setattr(writing, "REST_BYTES", 5000)
    sizes = [100, 1200, 3000, 9000, 1, 1200]
    tensors = {f"t{k}": torch.full((size,), k, dtype=torch.uint8).repeat(2) for k, size in enumerate(sizes)}
    write_store(tmp_path / "s", (), tensors.items())
    store = Store.open(tmp_path / "s")
    assert [run.shard[5:8] for run in store.index.rest] == ["000", "000", "001", "002", "003", "003"]
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in store.rest())


def test_one_layer_in_one_variant_is_held_in_memory(tmp_path):
    alive = weakref.WeakSet()

    def watched():
        for op in (Op(layer, name, "x", encode("dense", torch.ones(8, 8))) for layer in range(4) for name in "abc"):
            alive.add(op)
            assert len(alive) <= 3 + 1  # its end is seen by the next one's start
            yield op

    write_store(tmp_path / "s", watched())


def test_ctrl_c_leaves_nothing(tmp_path):
    def broken(after):
        yield from list(make_ops(4))[:after]
        raise KeyboardInterrupt

    def half(place):
        (place / "half").write_text("half")
        raise KeyboardInterrupt

    for ops, files in [(broken(0), None), (broken(3), None), (make_ops(), half)]:
        with pytest.raises(KeyboardInterrupt):
            write_store(tmp_path / "s", ops, files=files)
        assert names(tmp_path) == []


def test_a_disk_that_gets_full_leaves_nothing(tmp_path, monkeypatch):
    write_all = shards._write_all

    def full(stream, data):
        if not next(room):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write_all(stream, data)

    monkeypatch.setattr(shards, "_write_all", full)
    for after in (0, 1, 5, 12):
        room = iter([True] * after + [False])
        with pytest.raises(UserError, match=rf"{tmp_path / 's'}: no space left"):
            write_store(tmp_path / "s", make_ops(), [("norm", torch.ones(3))])
        assert names(tmp_path) == []


def test_a_disk_that_takes_a_write_in_pieces(tmp_path, monkeypatch):
    class Slow:
        def __init__(self, stream):
            self.stream = stream

        def write(self, data):
            return self.stream.write(data[:1000])

    write_all = shards._write_all
    monkeypatch.setattr(shards, "_write_all", lambda stream, data: write_all(Slow(stream), data))
    write_store(tmp_path / "s", make_ops())
    Store.open(tmp_path / "s").verify()


def test_too_little_space_is_said_before_anything_is_made(tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage(1 << 40, 0, 3 * 10**9))
    with pytest.raises(UserError, match="5017 MB more are needed, of which 17 stay free, and 3000 MB are free"):
        write_store(tmp_path / "s", iter(lambda: pytest.fail("an op was made"), None), expected_bytes=5 * 10**9)
    unfinished = Unfinished(tmp_path / "unfinished", {})
    with open(unfinished.folder / "layer-000.dense.safetensors", "wb") as written:
        written.truncate(10**9)
    with pytest.raises(UserError, match="4017 MB more are needed"):
        write_layers(tmp_path / "s", [], [], dict, expected_bytes=5 * 10**9, unfinished=unfinished)
    unfinished.remove()
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage(1 << 40, 0, 1000))
    with pytest.raises(UserError, match=rf"{tmp_path / 's'}: no space left; 17 MB more are needed"):
        write_store(tmp_path / "s", make_ops())
    assert names(tmp_path) == []


def test_ops_out_of_order_and_names_that_would_clash_are_refused(tmp_path):
    packed = encode("endor", sparse((4, 4)))
    ops = lambda *keys: [Op(layer, op, variant, packed) for layer, op, variant in keys]  # noqa: E731
    one = torch.ones(1)
    wrong = [
        (ops((0, "a", "x"), (0, "a", "x")), [], "layer 0, variant 'x': a comes twice"),
        (ops((0, "a", "x"), (1, "a", "x"), (0, "b", "x")), [], "layer-000.x.safetensors would be written twice"),
        ([Op(0, "a", "x", packed, {"values": one})], [], r"extras \['values'\] are names of the format's own"),
        ([], [("__padding_0__", one)], "comes twice, or has a name that the store uses"),
        (ops((0, "a", "../x")), [], "variant"),
    ]
    for given, rest, told in wrong:
        with pytest.raises(UserError, match=told):
            write_store(tmp_path / "s", given, rest)
    assert names(tmp_path) == []


def test_everything_is_on_the_disk_before_the_name_is(tmp_path, monkeypatch):
    synced, renamed, rename, fsync = set(), [], os.rename, os.fsync

    def record(descriptor):
        synced.add(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    def check(source, target):
        there = {str(path) for path in source.rglob("*")} | {str(source)}
        assert there == synced
        renamed.append(target)
        rename(source, target)

    monkeypatch.setattr(os, "fsync", record)
    monkeypatch.setattr(os, "rename", check)
    write_store(tmp_path / "s", make_ops(), [("a", torch.ones(1))], files=lambda place: (place / "c").touch())
    assert renamed == [tmp_path / "s"]
    assert str(tmp_path) in synced

"""A written store is read back, and any fault of a store on disk is refused, naming file and part."""

import hashlib
import json
import os
import re
import shutil

import numpy as np
import pytest
import torch

from tests import naive_formats as naive
from tests.storage.conftest import FORMATS as WRITTEN
from tests.storage.conftest import LAYERS, SHAPES, sparse
from toolkit.formats import FORMATS, FormatError, decode, encode
from toolkit.storage import index
from toolkit.storage.buffers import aligned_buffer
from toolkit.storage.direct import BLOCK_BYTES, ChangedError
from toolkit.storage.readers import open_reader
from toolkit.storage.runs import Layer, views
from toolkit.storage.store import Store
from toolkit.storage.writing import Op, write_store

CONFIG = "model/config.json"
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.int8)


def in_memory(store, layer):
    """The layer's bytes, read plainly."""
    data = (store.folder / layer.shard).read_bytes()
    return np.frombuffer(data[layer.offset : layer.offset + layer.nbytes], np.uint8).copy()


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_type_and_odd_shape_round_trips(tmp_path, name):
    """A layer for each type, with an op of each shape."""
    shapes = [(1, 4), (3, 8), (0, 4), (5, 0), (7, 132), (65, 32)]
    matrices = {(layer, str(shape)): sparse(shape, dtype) for layer, dtype in enumerate(DTYPES) for shape in shapes}
    for matrix in matrices.values():  # two of four, which every format can hold
        matrix[:, 2::4] = matrix[:, 3::4] = 0
    ops = (Op(layer, op, name, encode(name, matrix)) for (layer, op), matrix in matrices.items())
    write_store(tmp_path / "s", ops)
    store = Store.open(tmp_path / "s")
    store.verify()
    found = {
        (number, op): packed
        for number in range(len(DTYPES))
        for op, packed in store.layer(number, name).view(in_memory(store, store.layer(number, name))).items()
    }
    assert list(found) == list(matrices)
    for place, matrix in matrices.items():
        assert type(found[place]) is FORMATS[name]
        assert naive.same_bits(decode(found[place]), matrix)


def test_variants_lie_side_by_side_and_views_copy_nothing(store, weights):
    assert store.variants == tuple(sorted(WRITTEN))
    for (number, variant), layer in store.layers.items():
        buffer = in_memory(store, layer)
        for op, packed in layer.view(buffer).items():
            assert packed.name == variant
            assert torch.equal(decode(packed), weights[number, op])
            for name, tensor in packed.tensors.items():
                assert tensor.nbytes  # an empty tensor has no address
                offset = tensor.data_ptr() - buffer.ctypes.data
                assert offset == layer.ops[op].offset - layer.offset + layer.ops[op].pieces[name].offset
                assert offset + tensor.nbytes <= layer.nbytes
            run = layer.ops[op]
            extras = views(run.extras, buffer[run.offset - layer.offset :])
            assert torch.equal(extras["scale"], torch.full((3,), float(number)))
        over_a_tensor = layer.view(torch.from_numpy(buffer))
        assert all(torch.equal(decode(packed), weights[number, op]) for op, packed in over_a_tensor.items())


def test_ops_of_several_layers_and_variants_are_read_into_one_buffer(store, weights):
    names = [(1, "csr", "mlp.down"), (1, "csr", "attn.q"), (0, "endor", "mlp.up")]
    some = Layer({str(name): store.layer(*name[:2]).ops[name[2]] for name in names})
    buffer = aligned_buffer(some.nbytes)
    with open_reader("threads", store) as reader:
        reader.read(some.chunks, buffer)
    for (layer, _, op), packed in zip(names, some.view(buffer).values(), strict=True):
        assert torch.equal(decode(packed), weights[layer, op])


def test_one_aligned_run_an_op_and_the_ops_of_a_layer_adjoin(store, weights):
    for (_, variant), layer in store.layers.items():
        end = layer.offset
        for run in layer.ops.values():
            assert run.offset == end
            assert run.offset % BLOCK_BYTES == run.nbytes % BLOCK_BYTES == 0
            end += run.nbytes
        assert end == layer.offset + layer.nbytes == store.shards[layer.shard].identity.size_bytes
        assert layer.nbytes <= store.slot_bytes(variant)
    for form in WRITTEN:  # bytes of tensors leave the padding out
        scales = 3 * 4 * len(weights)
        assert store.tensor_bytes(form) == sum(encode(form, weight).nbytes for weight in weights.values()) + scales
        assert store.tensor_bytes(form) < store.nbytes(form) == sum(store.layer(n, form).nbytes for n in range(LAYERS))


def test_the_rest_and_what_is_known_of_the_model(store, rest):
    found = dict(store.rest())
    assert list(found) == list(rest)
    for name, tensor in rest.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)
    assert store.model == {"name": "twin"}
    assert (store.model_folder / "config.json").read_text() == "{}"
    assert store.files("csr").keys() == {f"layer-{n:03d}.csr.safetensors" for n in range(LAYERS)}
    assert {run.op: run.shape for run in store.layer(0, "dense").ops.values()} == SHAPES


def replaced(make):
    def harm(path):
        path.unlink()
        make(path)

    return harm


HARM = {
    "removed": lambda path: path.unlink(),
    "empty": lambda path: os.truncate(path, 0),
    "cut": lambda path: os.truncate(path, path.stat().st_size - 2),
    "longer": lambda path: os.truncate(path, path.stat().st_size + 1),
    "a FIFO": replaced(os.mkfifo),  # to open one would wait for ever
    "a folder": replaced(os.mkdir),
    "a device": replaced(lambda path: path.symlink_to("/dev/zero")),
}


@pytest.mark.parametrize("name", [index.FILE, "layer-000.endor.safetensors", "rest-000.safetensors", CONFIG])
def test_a_file_that_is_gone_of_another_length_or_no_file_is_named(folder, name):
    for kind, harm in HARM.items():
        copy = shutil.copytree(folder, folder.with_name(kind))
        harm(copy / name)
        with pytest.raises(FormatError, match=name):
            Store.open(copy).verify()
    with pytest.raises(FormatError, match="no index of a store"):
        Store.open(folder / "nothing")


def test_a_flipped_bit_anywhere_is_found_and_placed(folder, store):
    rng = np.random.default_rng(0)
    for run in store.index.runs:
        path = folder / run.shard
        whole = bytearray(path.read_bytes())
        place, bit = run.offset + int(rng.integers(run.nbytes)), 1 << int(rng.integers(8))
        whole[place] ^= bit
        path.write_bytes(whole)
        with pytest.raises(FormatError, match=f"{re.escape(str(path))}.*{re.escape(run.label)} does not match"):
            Store.open(folder).verify()
        whole[place] ^= bit
        path.write_bytes(whole)
    Store.open(folder).verify()
    for name, old, new in [(CONFIG, "{}", "{ }"), (index.FILE, "twin", "twig")]:
        path = folder / name
        content = path.read_text()
        path.write_text(content.replace(old, new))
        with pytest.raises(FormatError, match=f"{name}: damaged"):
            Store.open(folder).verify()
        path.write_text(content)


def spoil(folder, run):
    with open(folder / run.shard, "r+b") as stream:
        stream.seek(run.offset)
        stream.write(b"\xff\x00\xff\x00\xff")


def test_only_the_variants_that_are_asked_for_are_verified(folder, store):
    first, second = store.variants[:2]
    spoil(folder, next(run for run in store.index.ops if run.variant == second))
    store = Store.open(folder)
    store.verify(first)
    for variants in ((second,), (first, second), ()):
        with pytest.raises(FormatError, match=f"damaged: .*{second}"):
            store.verify(*variants)


def test_the_rest_is_verified_whenever_it_is_read(folder, store):
    spoil(folder, store.index.rest[0])
    with pytest.raises(FormatError, match="embedding does not match its checksum"):
        dict(Store.open(folder).rest())


def sign(folder, change):
    """Alter the index and sign it again, as a faulty writer would."""
    path = folder / index.FILE
    record = json.loads(path.read_text())
    del record["sha256"]
    change(record)
    path.write_text(json.dumps(record | {"sha256": index.digest(record)}))


def op(**changes):
    return lambda record: record["ops"][0].update(changes)


WRONG = {  # faults of a signed index -> words of the error
    "version": (lambda r: r.update(version=2), "version 2 of the index"),
    "a way out of the folder": (lambda r: r["shards"][0].update(file="../x.safetensors"), "shards/0/file"),
    "no whole blocks": (op(nbytes=4096 + 256), "layer 0 attn.q .*no whole blocks"),
    "a later format": (op(format_version=99), "layer 0 attn.q .*version 99"),
    "tensors of another shape": (op(shape=[34, 70]), "layer 0 attn.q .*bitmap is"),
}


def test_a_well_signed_index_that_says_nonsense(folder):
    """Other faults of signed stores are drawn at random (`tests/hostile`)."""
    sound = (folder / index.FILE).read_text()
    for change, told in WRONG.values():
        sign(folder, change)
        with pytest.raises(FormatError, match=rf"index\.json: .*{told}"):
            Store.open(folder)
        (folder / index.FILE).write_text(sound)


def test_contents_that_contradict_each_other_are_found_though_they_are_signed(folder):
    """Row offsets of 2**40 ended the process when a kernel followed them."""
    store = Store.open(folder)
    run = store.layer(0, "endor").ops["attn.q"]
    content, piece = bytearray((folder / run.shard).read_bytes()), run.pieces["row_offsets"]
    data = np.frombuffer(content, np.uint8)[run.offset : run.offset + run.nbytes]
    data[piece.offset : piece.end].view(np.int64)[5] = 1 << 40
    (folder / run.shard).write_bytes(content)
    place = store.index.ops.index(run)
    sign(folder, lambda record: record["ops"][place].update(sha256=hashlib.sha256(data).hexdigest()))
    with pytest.raises(FormatError, match=r"layer-000.endor.*layer 0 attn.q \(endor\): inconsistent endor: "):
        Store.open(folder).verify()


def with_its_time_restored(path):
    before, content = path.stat(), bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize("harm", [HARM["removed"], HARM["cut"], with_its_time_restored])
def test_a_store_that_changes_while_it_is_open(folder, store, harm):
    harm(folder / "rest-000.safetensors")
    for use in (lambda: dict(store.rest()), store.verify):
        with pytest.raises(ChangedError, match=r"rest-000.*while it was in use"):
            use()


ALLOWED = {
    "touch": lambda path: path.touch(),
    "chmod": lambda path: path.chmod(0o600),
    "linked": lambda path: path.with_name("link").hardlink_to(path),
    "written as it was": lambda path: path.write_bytes(path.read_bytes()),
}


def test_a_shard_whose_times_alone_change_is_read_on(folder, store):
    before = dict(store.rest())
    layer = store.layer(0, "endor")
    target = aligned_buffer(layer.nbytes)
    with open_reader("threads", store, "endor") as reader:
        for change in ALLOWED.values():
            for shard in ("rest-000.safetensors", layer.shard):
                change(folder / shard)
                (folder / "link").unlink(missing_ok=True)
            assert {name: tensor.tolist() for name, tensor in store.rest()} == {
                name: tensor.tolist() for name, tensor in before.items()
            }
            target[:] = 0
            reader.read(layer.chunks, target)
            assert (target == in_memory(store, layer)).all()
        with_its_time_restored(folder / layer.shard)
        with pytest.raises(ChangedError, match="while it was in use"):
            reader.read(layer.chunks, target)


def test_what_was_read_while_times_changed_is_read_again(folder, store):
    """A file that is written over by the same bytes is for a moment another one."""
    shard, values = folder / "rest-000.safetensors", iter([b"torn", b"whole"])

    def read():
        value = next(values)
        if value == b"torn":
            shard.write_bytes(shard.read_bytes())
        return value

    assert store.shards[shard.name].unchanged(read) == b"whole"

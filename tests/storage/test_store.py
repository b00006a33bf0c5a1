"""What was written comes back, and whatever is wrong with a store on disk is refused, naming file and part."""

import contextlib
import hashlib
import json
import os

import numpy as np
import pytest
import torch

from tests import naive_formats as naive
from tests.naive_storage import read_shard
from tests.storage.conftest import FORMATS as WRITTEN
from tests.storage.conftest import LAYERS, SHAPES, sparse
from toolkit.errors import UserError
from toolkit.formats import FORMATS, FormatError, decode, encode
from toolkit.storage import index
from toolkit.storage.buffers import aligned_buffer
from toolkit.storage.direct import BLOCK_BYTES, ChangedError
from toolkit.storage.readers import open_reader
from toolkit.storage.runs import Layer, views
from toolkit.storage.store import Store
from toolkit.storage.writing import Op, write_store

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.int8)


def in_memory(store, layer):
    """The layer's bytes, read plainly."""
    data = (store.folder / layer.shard).read_bytes()
    return np.frombuffer(data[layer.offset : layer.offset + layer.nbytes], np.uint8).copy()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_every_format_type_and_odd_shape_round_trips(tmp_path, name, dtype):
    shapes = [(1, 4), (3, 8), (0, 4), (5, 0), (7, 132), (65, 32)]
    matrices = {f"op{rows}x{columns}": sparse((rows, columns), dtype) for rows, columns in shapes}
    if name == "two_four":
        for matrix in matrices.values():
            matrix[:, 2::4] = matrix[:, 3::4] = 0
    write_store(tmp_path / "s", (Op(0, op, name, encode(name, matrix)) for op, matrix in matrices.items()))
    store = Store.open(tmp_path / "s")
    layer = store.layer(0, name)
    found = layer.view(in_memory(store, layer))
    assert list(found) == list(matrices)
    for op, matrix in matrices.items():
        assert type(found[op]) is FORMATS[name]
        assert found[op].shape == tuple(matrix.shape)
        found[op].check()
        assert naive.same_bits(decode(found[op]), matrix)
    store.verify()


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


def test_views_over_a_tensor_as_over_an_array(store, weights):
    layer = store.layer(1, "endor")
    views = layer.view(torch.from_numpy(in_memory(store, layer)))
    assert all(torch.equal(decode(packed), weights[1, op]) for op, packed in views.items())


def test_ops_of_several_layers_and_variants_are_read_into_one_buffer(store, weights):
    names = [(1, "csr", "mlp.down"), (1, "csr", "attn.q"), (0, "endor", "mlp.up")]
    some = Layer({str(name): store.layer(*name[:2]).ops[name[2]] for name in names})
    buffer = aligned_buffer(some.nbytes)
    with open_reader("threads", store) as reader:
        reader.read(some.chunks, buffer)
    for (layer, _, op), packed in zip(names, some.view(buffer).values(), strict=True):
        assert torch.equal(decode(packed), weights[layer, op])


def test_one_aligned_run_an_op_and_the_ops_of_a_layer_adjoin(store):
    for layer in store.layers.values():
        end = layer.offset
        for run in layer.ops.values():
            assert run.offset == end
            assert run.offset % BLOCK_BYTES == run.nbytes % BLOCK_BYTES == 0
            end += run.nbytes
        assert end == layer.offset + layer.nbytes == store.shards[layer.shard].identity.size_bytes
        assert layer.nbytes <= store.slot_bytes(next(iter(layer.ops.values())).variant)


def test_bytes_of_tensors_leave_the_padding_out(store, weights):
    for form in WRITTEN:
        scales = 3 * 4 * len(weights)
        assert store.tensor_bytes(form) == sum(encode(form, weight).nbytes for weight in weights.values()) + scales
        assert store.tensor_bytes(form) < store.nbytes(form)


def test_the_index_agrees_with_the_shards_own_headers(store):
    for run in (*store.index.ops, *store.index.rest):
        tensors = read_shard(store.folder / run.shard)
        for name, piece in {**run.pieces, **getattr(run, "extras", {})}.items():
            found = tensors[f"{run.op}.{name}" if hasattr(run, "op") else name]
            assert found["first"] == run.offset + piece.offset
            assert tuple(found["shape"]) == piece.shape
            assert len(found["bytes"]) == piece.nbytes


def test_the_rest_and_what_is_known_of_the_model(store, rest):
    found = dict(store.rest())
    assert list(found) == list(rest)
    for name, tensor in rest.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)
    assert store.model == {"name": "twin"}
    assert (store.model_folder / "config.json").read_text() == "{}"
    assert repr(store).startswith(f"Store('{store.folder}': csr 0.")
    assert store.nbytes("csr") == sum(store.layer(n, "csr").nbytes for n in range(LAYERS))
    assert store.files("csr").keys() == {f"layer-{n:03d}.csr.safetensors" for n in range(LAYERS)}


def test_unknown_layers_and_variants(store):
    with pytest.raises(UserError, match="unknown variant of store 'int8'; choose from: csr, dense, endor, zstd"):
        store.layer(0, "int8")
    with pytest.raises(UserError, match=r"no layer 5 in variant 'csr' of .*: it has 2 layers"):
        store.layer(5, "csr")
    for question in (store.files, store.slot_bytes, store.nbytes):
        with pytest.raises(UserError, match="unknown variant"):
            question("int8")


@pytest.mark.parametrize("name", ["layer-000.endor.safetensors", "rest-000.safetensors", "model/config.json"])
def test_a_missing_file(folder, name):
    (folder / name).unlink()
    with pytest.raises(FormatError, match=rf"{name}.*though the index names it"):
        Store.open(folder)


def test_a_shard_of_any_other_length(folder):
    path = folder / "layer-001.csr.safetensors"
    whole = path.read_bytes()
    for length in [0, 1, 7, 8, *range(100, len(whole), 3001), len(whole) - 1]:
        path.write_bytes(whole[:length])
        with pytest.raises(FormatError, match=rf"layer-001.csr.*: {length} bytes; the index says {len(whole)}"):
            Store.open(folder)
    path.write_bytes(whole + b"\0")
    with pytest.raises(FormatError, match="the index says"):
        Store.open(folder)


def test_a_flipped_bit_anywhere_is_found_and_placed(folder, store):
    rng = np.random.default_rng(0)
    for run in store.index.runs:
        path = folder / run.shard
        whole = bytearray(path.read_bytes())
        place = run.offset + int(rng.integers(run.nbytes))
        bit = 1 << int(rng.integers(8))
        whole[place] ^= bit
        path.write_bytes(whole)
        with pytest.raises(FormatError) as caught:
            Store.open(folder).verify()
        assert str(path) in str(caught.value)
        assert f"{run.label} does not match" in str(caught.value)
        whole[place] ^= bit
        path.write_bytes(whole)
    Store.open(folder).verify()


def test_only_the_variants_that_are_asked_for_are_verified(folder, store):
    first, second = store.variants[:2]
    run = next(run for run in store.index.ops if run.variant == second)
    with open(folder / run.shard, "r+b") as stream:
        stream.seek(run.offset)
        stream.write(b"\xff\x00\xff\x00\xff")
    store = Store.open(folder)
    store.verify(first)
    for variants in ((second,), (first, second), ()):
        with pytest.raises(FormatError, match=f"damaged: .*{second}"):
            store.verify(*variants)


def test_a_flipped_bit_in_the_rest_or_the_small_files(folder, store):
    run = store.index.rest[0]
    path = folder / run.shard
    whole = bytearray(path.read_bytes())
    whole[run.offset] ^= 4
    path.write_bytes(whole)
    with pytest.raises(FormatError, match="embedding does not match its checksum"):
        dict(Store.open(folder).rest())
    whole[run.offset] ^= 4
    path.write_bytes(whole)
    (folder / "model" / "config.json").write_text("{ }")
    with pytest.raises(FormatError, match=r"config.json: damaged"):
        Store.open(folder).verify()


def test_every_flipped_bit_of_the_index_is_refused(folder):
    path = folder / index.FILE
    whole = bytearray(path.read_bytes())
    rng = np.random.default_rng(1)
    for place in rng.integers(len(whole), size=150).tolist():
        bit = 1 << int(rng.integers(8))
        whole[place] ^= bit
        path.write_bytes(whole)
        if json_of(whole) != json_of(whole, place, bit):  # spaces between tokens mean nothing
            with pytest.raises(FormatError, match=r"index\.json"):
                Store.open(folder)
        whole[place] ^= bit


def json_of(data, place=None, bit=0):
    data = bytearray(data)
    if place is not None:
        data[place] ^= bit
    try:
        return json.loads(data)
    except ValueError:
        return None


def test_every_truncation_of_the_index_is_refused(folder):
    path = folder / index.FILE
    whole = path.read_bytes()
    for length in range(0, len(whole) - 2, 97):
        path.write_bytes(whole[:length])
        with pytest.raises(FormatError, match=r"index\.json: no index of a store"):
            Store.open(folder)


def test_a_folder_that_is_no_store(tmp_path):
    with pytest.raises(FormatError, match="no index of a store"):
        Store.open(tmp_path)
    with pytest.raises(FormatError, match="no index of a store"):
        Store.open(tmp_path / "nothing")


def sign(folder, change):
    """Alter the index and sign it again, as a faulty writer would."""
    path = folder / index.FILE
    record = json.loads(path.read_text())
    del record["sha256"]
    change(record)
    path.write_text(json.dumps(record | {"sha256": index.digest(record)}))


def op(number, **changes):
    return lambda record: record["ops"][number].update(changes)


def _piece(shape):
    return {"dtype": "float32", "shape": shape, "offset": 0}


def values(**changes):
    return lambda record: record["ops"][0]["pieces"]["values"].update(changes)


FIRST = r"layer 0 attn.q \(endor\).*"
WRONG = {  # faults of a signed index -> words of the error
    "version": (lambda r: r.update(version=2), r"version 2 of the index; this code reads 1"),
    "no version": (lambda r: r.pop("version"), r"version None"),
    "no shards": (lambda r: r.pop("shards"), r"shards: .*Field required"),
    "a way out of the folder": (lambda r: r["shards"][0].update(file="../x.safetensors"), r"shards/0/file"),
    "another way out": (lambda r: r["files"].update({"model/../../x": "0" * 64}), r"files"),
    "a negative offset": (op(0, offset=-4096), FIRST + "no whole blocks"),
    "no whole blocks": (op(0, nbytes=4096 + 256), FIRST + "no whole blocks"),
    "an op beyond the end": (op(2, nbytes=1 << 30), r"ends beyond its shard layer-000.endor.safetensors"),
    "an unlisted shard": (lambda r: r["shards"].pop(0), r"ends beyond its shard layer-000.endor.safetensors"),
    "an unknown format": (op(0, format="coo"), FIRST + "unknown format 'coo'"),
    "a later format": (op(0, format_version=99), FIRST + "endor version 99; this code reads"),
    "an unknown type": (op(0, dtype="float64"), r"ops/0/dtype"),
    "too large a tensor": (values(shape=[1 << 40]), FIRST),
    "tensors of another shape": (op(0, shape=[34, 70]), FIRST + "bitmap is"),
    "tensors of another type": (op(0, dtype="int8"), FIRST + "values are torch.float16"),
    "a tensor too many": (lambda r: r["ops"][0]["pieces"].update(more=_piece([0])), FIRST + "unexpected"),
    "no values": (lambda r: r["ops"][0]["pieces"].pop("values"), FIRST + "missing"),
    "rows beyond all matrices": (op(0, shape=[1 << 40, 0]), FIRST),
}


def test_a_well_signed_index_that_says_nonsense(folder):
    sound = (folder / index.FILE).read_text()
    for name, (change, told) in WRONG.items():
        sign(folder, change)
        with pytest.raises(FormatError, match=told) as caught:
            Store.open(folder)
        assert "index.json" in str(caught.value), name
        assert "\n" not in str(caught.value), name
        (folder / index.FILE).write_text(sound)


def test_an_index_that_is_no_mapping_of_text(folder):
    for text, told in [(b"[1]", "version None of the index"), ('{"é": 1}'.encode("latin-1"), "can't decode")]:
        (folder / index.FILE).write_bytes(text)
        with pytest.raises(FormatError, match=rf"index\.json: .*{told}"):
            Store.open(folder)


@pytest.mark.parametrize("name", ["index.json", "layer-000.endor.safetensors", "model/config.json"])
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: path.symlink_to("/dev/zero")])
def test_only_regular_files_are_opened(folder, name, make):
    """Opening a FIFO would wait for ever."""
    (folder / name).unlink()
    make(folder / name)
    with pytest.raises(FormatError, match=rf"{name}: .*(regular file|missing|directory)"):
        Store.open(folder)


def seal(folder, number, name, change):
    """Alter a tensor of an op on the disk, and sign shard and index again."""
    run = Store.open(folder).index.ops[number]
    path = folder / run.shard
    content = bytearray(path.read_bytes())
    data = content[run.offset : run.offset + run.nbytes]
    piece = run.pieces[name]
    change(np.frombuffer(data, np.uint8)[piece.offset : piece.end].view(np.dtype(str(piece.dtype)[6:])))
    content[run.offset : run.offset + run.nbytes] = data
    path.write_bytes(content)
    sign(folder, op(number, sha256=hashlib.sha256(data).hexdigest()))


@pytest.mark.parametrize("form", ["endor", "csr", "zstd"])
def test_contents_that_contradict_each_other_are_found_though_they_are_signed(folder, form):
    """Row offsets of 2**40 ended the process when a kernel followed them."""
    number = next(n for n, run in enumerate(Store.open(folder).index.ops) if run.format == form)
    name, place = ("offsets", 0) if form == "zstd" else ("row_offsets", 5)
    for wild in (1 << 40, -(1 << 40), (1 << 63) - 1):
        seal(folder, number, name, lambda tensor, wild=wild: tensor.__setitem__(place, wild))
        store = Store.open(folder)
        with pytest.raises(FormatError, match=rf"layer-000.{form}.*layer 0 attn.q \({form}\): inconsistent {form}: "):
            store.verify()
        layer = store.layer(0, form)
        for weight in layer.view(in_memory(store, layer)).values():  # not verified: nothing outside is touched
            with contextlib.suppress(ValueError):
                weight.decode()
                weight.matvec(torch.ones(weight.shape[1]))


def test_a_shard_that_is_rewritten_in_place_with_its_time_restored(folder, store):
    path = folder / "rest-000.safetensors"
    before = path.stat()
    with open(path, "r+b") as stream:
        stream.seek(store.index.rest[0].offset)
        stream.write(b"\1")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_mtime_ns == before.st_mtime_ns
    with pytest.raises(ChangedError, match=r"rest-000.*replaced, cut or written to while it was in use"):
        store.verify()


@pytest.mark.parametrize("harm", ["written to", "removed", "cut"])
def test_a_store_that_changes_while_it_is_open(folder, store, harm):
    path = folder / "rest-000.safetensors"
    whole = path.read_bytes()
    path.unlink()
    if harm != "removed":
        path.write_bytes(whole if harm == "written to" else whole[:4096])
    for use in (lambda: dict(store.rest()), store.verify):
        with pytest.raises(ChangedError, match=r"rest-000.*(replaced, cut or written to|gone) while it was in use"):
            use()


def test_shapes_of_every_op(store):
    assert {run.op: run.shape for run in store.layer(0, "dense").ops.values()} == SHAPES

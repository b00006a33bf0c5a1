"""Parts of a layer, read and made weights of, against the whole that is decoded and sliced."""

import random

import pytest
import torch

from tests.storage.conftest import SHAPES, sparse
from toolkit.errors import UserError
from toolkit.formats import decode, encode
from toolkit.formats.scaled import Scaled
from toolkit.storage.buffers import aligned_buffer
from toolkit.storage.direct import BLOCK_BYTES
from toolkit.storage.readers import open_reader
from toolkit.storage.runs import Part, Range
from toolkit.storage.store import Store
from toolkit.storage.writing import Op, write_store

ROWS, COLUMNS = 301, 173  # rows start and end within blocks, and share them


def fetched(reader, what):
    """The bytes of something that can be read, in a buffer of its size."""
    buffer = aligned_buffer(what.nbytes)
    reader.read(what.ranges, buffer)
    return buffer


@pytest.fixture(scope="module")
def odd(tmp_path_factory):
    """A store of one odd matrix in several formats, with and without scales, and what each decodes to."""
    folder, weight = tmp_path_factory.mktemp("odd") / "store", sparse((ROWS, COLUMNS))
    weights = {form: encode(form, weight) for form in ("dense", "endor", "csr", "zstd")}
    weights |= {f"int8-{form}": Scaled.encode(form, weight) for form in ("dense", "endor")}
    write_store(folder, [Op.of(0, "fc", variant, packed) for variant, packed in weights.items()])
    return Store.open(folder), {variant: packed.decode() for variant, packed in weights.items()}


@pytest.mark.parametrize("variant", ["dense", "endor", "csr", "int8-dense", "int8-endor"])
def test_random_rows_are_those_of_the_whole(odd, variant):
    store, expected = odd
    run, draw = store.layer(0, variant).ops["fc"], random.Random(0)
    bounds = [sorted(draw.choices(range(ROWS + 1), k=2)) for _ in range(12)]
    with open_reader("threads", store, variant) as reader:
        index = run.row_index.tensors(fetched(reader, run.row_index))
        for first, last in [*bounds, (0, ROWS), (0, 1), (ROWS - 1, ROWS), (7, 7), (0, 0), (ROWS, ROWS)]:
            rows = run.rows(first, last, index)
            found = rows.view(fetched(reader, rows))
            found.stored.check()
            assert found.shape == (last - first, COLUMNS)
            assert torch.equal(found.decode(), expected[variant][first:last])
            assert all(part.nbytes % BLOCK_BYTES == part.offset % BLOCK_BYTES == 0 for part in rows.ranges)
            assert all(run.offset <= part.offset for part in rows.ranges)
            assert all(part.offset + part.nbytes <= run.offset + run.nbytes for part in rows.ranges)


@pytest.mark.parametrize("variant", ["dense", "endor"])
def test_few_rows_are_few_bytes(odd, variant):
    store, _ = odd
    run = store.layer(0, variant).ops["fc"]
    with open_reader("threads", store, variant) as reader:
        index = run.row_index.tensors(fetched(reader, run.row_index))
    rows = run.rows(100, 102, index)
    assert rows.nbytes <= 2 * BLOCK_BYTES * len(rows.ranges) < run.nbytes


def test_a_part_of_a_layer_is_several_ops_or_rows_in_one_buffer(store, weights):
    layer = store.layer(1, "endor")
    with open_reader("threads", store, "endor") as reader:
        some = layer.only("mlp.down", "attn.q")
        found = some.view(fetched(reader, some))
        assert list(found) == ["mlp.down", "attn.q"]
        assert all(torch.equal(decode(packed), weights[1, op]) for op, packed in found.items())
        up = layer.ops["mlp.up"]
        index = up.row_index.tensors(fetched(reader, up.row_index))
        mixed = Part({"mlp.up": up.rows(3, 77, index), "attn.q": layer.ops["attn.q"]})
        found = mixed.view(fetched(reader, mixed))
        assert torch.equal(decode(found["mlp.up"]), weights[1, "mlp.up"][3:77])
        assert torch.equal(decode(found["attn.q"]), weights[1, "attn.q"])
        whole = layer.only(*layer.ops)
        assert whole.nbytes == layer.nbytes
        found = whole.view(fetched(reader, whole))
        assert all(torch.equal(decode(packed), weights[1, op]) for op, packed in found.items())
        assert fetched(reader, whole).tobytes() == fetched(reader, layer).tobytes()


@pytest.mark.parametrize(("start", "stop"), [(0, 1), (4095, 4096), (4095, 4097), (5, 5), (4096, 4096), (1, 9000)])
def test_blocks_around_a_range_by_hand(start, stop):
    wanted = Range("s", start, stop)
    blocks = sorted({byte // BLOCK_BYTES for byte in range(start, stop)})
    assert wanted.nbytes == len(blocks) * BLOCK_BYTES
    if blocks:
        assert wanted.offset == blocks[0] * BLOCK_BYTES


def test_what_is_not_there_is_refused(odd, store):
    run = odd[0].layer(0, "dense").ops["fc"]
    for first, last in [(0, ROWS + 1), (-1, 3), (5, 4), (ROWS + 1, ROWS + 1)]:
        with pytest.raises(UserError, match=rf"rows {first} to {last}: expected a range of its {ROWS} rows"):
            run.rows(first, last)
    for start, stop in [(0, run.nbytes + 1), (-1, 3), (5, 4)]:
        with pytest.raises(UserError, match=rf"bytes {start} to {stop}: expected a range within its {run.nbytes}"):
            run.range(start, stop)
    sparse_run = odd[0].layer(0, "endor").ops["fc"]
    with pytest.raises(UserError, match="row_offsets says where rows lie: read `row_index`"):
        sparse_run.rows(0, 1)
    with pytest.raises(UserError, match="they are not there"):  # offsets of a larger matrix
        sparse_run.rows(0, 1, {"row_offsets": torch.tensor([0, 1 << 40])})
    with pytest.raises(UserError, match="format 'zstd' does not tell where its rows lie"):
        odd[0].layer(0, "zstd").ops["fc"].rows(0, 1)
    with pytest.raises(UserError, match=r"unknown op of this layer 'fc1'; choose from: attn.q, mlp.down, mlp.up"):
        store.layer(0, "dense").only(*SHAPES, "fc1")

"""The index on its own: what is written is read back, and no nonsense gets through as another kind of error."""

import copy
import json

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from toolkit.formats import FORMATS, FormatError, encode
from toolkit.storage import index
from toolkit.storage.direct import BLOCK_BYTES
from toolkit.storage.index import Index
from toolkit.storage.runs import BlockRun, OpRun, RestRun
from toolkit.storage.shards import DTYPES, layout
from toolkit.storage.store import Store

SHA = st.text("0123456789abcdef", min_size=64, max_size=64)
NAMES = st.text(st.characters(exclude_categories=["Cs", "Cc", "Zl", "Zp"]), min_size=1, max_size=8)
TENSORS = st.dictionaries(
    NAMES,
    st.builds(
        lambda shape, dtype: torch.zeros(shape, dtype=dtype),
        st.lists(st.integers(0, 30), max_size=3),
        st.sampled_from([*DTYPES]),
    ),
    max_size=3,
)


@st.composite
def indices(draw):
    """Shards of ops and of other tensors, one run after the other."""
    shards, headers, ops, rest = {}, [], [], []
    for number in range(draw(st.integers(0, 3))):
        file, end = f"layer-{number}.safetensors", draw(st.integers(1, 3)) * BLOCK_BYTES
        headers.append(BlockRun(file, 0, end, draw(SHA)))
        for name in draw(st.lists(NAMES, unique=True, max_size=3)):
            dtype = draw(st.sampled_from([torch.float32, torch.float16, torch.bfloat16, torch.int8]))
            shape = draw(st.tuples(st.integers(0, 9), st.sampled_from([0, 4, 36])))
            packed = encode(draw(st.sampled_from([*FORMATS])), torch.zeros(shape, dtype=dtype))
            extras = {key: tensor for key, tensor in draw(TENSORS).items() if key not in packed.tensors}
            pieces, nbytes = layout({**packed.tensors, **extras})
            ops.append(
                OpRun(
                    *(file, end, nbytes, draw(SHA), number, name, "v", packed.name, packed.version),
                    dtype=dtype,
                    shape=shape,
                    pieces={key: pieces[key] for key in packed.tensors},
                    extras={key: pieces[key] for key in extras},
                )
            )
            end += nbytes
        shards[file] = end
    for name, tensor in draw(TENSORS).items():
        pieces, nbytes = layout({name: tensor})
        file = f"rest-{len(shards)}.safetensors"
        headers.append(BlockRun(file, 0, BLOCK_BYTES, draw(SHA)))
        rest.append(RestRun(file, BLOCK_BYTES, nbytes, draw(SHA), name, pieces))
        shards[file] = BLOCK_BYTES + nbytes
    files = draw(st.dictionaries(st.text("abc.", min_size=3).map(lambda name: f"model/{name}x"), SHA, max_size=2))
    files = {name: sha for name, sha in files.items() if ".." not in name}
    model = draw(st.dictionaries(st.text(), st.one_of(st.none(), st.floats(allow_nan=False), st.text()), max_size=2))
    return Index(model, files, shards, tuple(headers), tuple(ops), tuple(rest))


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(written=indices())
def test_what_is_written_is_read(tmp_path, written):
    index.write(written, tmp_path / "i")
    assert index.read(tmp_path / "i") == written


JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-5, 1 << 70), st.floats(), st.text(max_size=5)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)),
    max_leaves=5,
)


def places(value, at=()):
    """The path to every value in a record."""
    yield at
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in children:
        yield from places(child, (*at, key))


@pytest.fixture
def record(folder):
    record = json.loads((folder / index.FILE).read_text())
    del record["sha256"]
    return record


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_signed_index_with_anything_anywhere_is_sound_or_refused(folder, record, data):
    at = data.draw(st.sampled_from([*places(record)][1:]))
    altered = copy.deepcopy(record)
    inside = altered
    for key in at[:-1]:
        inside = inside[key]
    value = data.draw(JSON)
    inside[at[-1]] = value
    path = folder / index.FILE
    path.write_text(json.dumps(altered | {"sha256": index._digest(altered)}))
    try:
        store = Store.open(folder)
    except FormatError as error:
        assert "\n" not in str(error)  # noqa: PT017 - any other error fails the test
    else:  # what it says may be wrong, but nothing lies outside the shards
        for run in store.index.runs:
            assert 0 <= run.offset <= run.offset + run.nbytes <= store.shards[run.shard].identity.size_bytes

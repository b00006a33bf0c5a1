"""The index on its own: an index that was written is read back."""

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from toolkit.formats import FORMATS, encode
from toolkit.storage import index
from toolkit.storage.direct import BLOCK_BYTES
from toolkit.storage.index import Index, Shard
from toolkit.storage.runs import OpRun, RestRun
from toolkit.storage.shards import DTYPES, layout

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
    shards, ops, rest = [], [], []
    for number in range(draw(st.integers(0, 3))):
        file, end = f"layer-{number}.safetensors", draw(st.integers(1, 3)) * BLOCK_BYTES
        header = (end, draw(SHA))
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
        shards.append(Shard(file, end, *header))
    for name, tensor in draw(TENSORS).items():
        pieces, nbytes = layout({name: tensor})
        file = f"rest-{len(shards)}.safetensors"
        rest.append(RestRun(file, BLOCK_BYTES, nbytes, draw(SHA), name, pieces))
        shards.append(Shard(file, BLOCK_BYTES + nbytes, BLOCK_BYTES, draw(SHA)))
    files = draw(st.dictionaries(st.text("abc.", min_size=3).map(lambda name: f"model/{name}x"), SHA, max_size=2))
    files = {name: sha for name, sha in files.items() if ".." not in name}
    model = draw(st.dictionaries(st.text(), st.one_of(st.none(), st.floats(allow_nan=False), st.text()), max_size=2))
    return Index(model, files, tuple(shards), tuple(ops), tuple(rest))


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(written=indices())
def test_what_is_written_is_read(tmp_path, written):
    index.write(written, tmp_path / "i")
    assert index.read(tmp_path / "i") == written

import hashlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from tests.naive_storage import read_shard
from toolkit.storage.direct import BLOCK_BYTES
from toolkit.storage.shards import DTYPES, TENSOR_BYTES, layout, write_shard

SHAPES = st.lists(st.integers(0, 40), max_size=3).map(tuple)
GROUPS = st.lists(
    st.dictionaries(
        st.text('abé"\\.', min_size=1, max_size=4), st.tuples(st.sampled_from([*DTYPES]), SHAPES), max_size=4
    ),
    max_size=4,
)


def tensor(dtype, shape):
    values = torch.arange(torch.Size(shape).numel()).reshape(shape) % 100
    return values.to(dtype)


@settings(max_examples=25, deadline=None)
@given(GROUPS)
def test_any_groups_as_the_library_reads_them(tmp_path_factory, groups):
    path = tmp_path_factory.mktemp("shard") / "a.safetensors"
    groups = [{name: tensor(*kind) for name, kind in group.items()} for group in groups]
    prefixes = [f"{number}." for number in range(len(groups))]
    runs = write_shard(path, groups, prefixes, {"variant": "x"})
    expected = {p + name: value for p, group in zip(prefixes, groups, strict=True) for name, value in group.items()}
    with safe_open(path, framework="pt") as file:
        assert file.metadata() == {"variant": "x"}
        names = set(file.keys())
        assert {name for name in names if not name.startswith("__padding_")} == expected.keys()
        for name, value in expected.items():
            found = file.get_tensor(name)
            assert (found.dtype, found.shape) == (value.dtype, value.shape)
            assert torch.equal(found, value)
    _check_places(path, runs, groups, prefixes)


def _check_places(path, runs, groups, prefixes):
    header, *written = runs
    data, tensors, end = path.read_bytes(), read_shard(path), header.nbytes
    for run, group, prefix in zip(written, groups, prefixes, strict=True):
        assert run.offset == end
        assert run.nbytes % BLOCK_BYTES == 0
        pieces, nbytes = layout(group)
        assert nbytes == run.nbytes
        for name, piece in pieces.items():
            assert tensors[prefix + name]["first"] == run.offset + piece.offset
            assert piece.offset % TENSOR_BYTES == 0
            assert piece.end <= run.nbytes
        end = run.offset + run.nbytes
    assert header.nbytes % BLOCK_BYTES == 0
    assert end == len(data)
    for run in runs:
        assert hashlib.sha256(data[run.offset : run.offset + run.nbytes]).hexdigest() == run.sha256
    for name, found in tensors.items():
        if name.startswith("__padding_"):
            assert found["bytes"].strip(b"\0") == b""


def test_a_shard_by_hand(tmp_path):
    """8 + 305 bytes of header in one block; 12 bytes, a hole to 256, 3 bytes, a hole to 4096; then one more block."""
    groups = [{"a": torch.tensor([1, 2, 3], dtype=torch.int32), "b": torch.ones(3, dtype=torch.uint8)}]
    groups.append({"c": torch.tensor([[7]], dtype=torch.int8)})
    write_shard(tmp_path / "s", groups, ["x.", "y."], {})
    data = (tmp_path / "s").read_bytes()
    assert len(data) == 3 * 4096
    assert data[:9] == (4088).to_bytes(8, "little") + b"{"
    assert data[4096 : 4096 + 12] == bytes([1, 0, 0, 0, 2, 0, 0, 0, 3, 0, 0, 0])
    assert data[4096 + 12 : 4096 + 256].strip(b"\0") == b""
    assert data[4096 + 256 : 4096 + 260] == bytes([1, 1, 1, 0])
    assert data[8192] == 7
    assert sorted(read_shard(tmp_path / "s")) == [
        "__padding_0__",
        "__padding_1__",
        "__padding_2__",
        "x.a",
        "x.b",
        "y.c",
    ]


def test_strides_and_parameters_are_written_as_they_read(tmp_path):
    matrix = torch.arange(12.0).reshape(3, 4)
    write_shard(tmp_path / "s", [{"t": matrix.T, "p": torch.nn.Parameter(matrix[:, 1])}], [""], {})
    with safe_open(tmp_path / "s", framework="pt") as file:
        assert torch.equal(file.get_tensor("t"), matrix.T)
        assert torch.equal(file.get_tensor("p"), matrix[:, 1])


def test_a_file_that_is_there_is_never_written_over(tmp_path):
    (tmp_path / "s").write_text("mine")
    with pytest.raises(FileExistsError):
        write_shard(tmp_path / "s", [], [], {})
    assert (tmp_path / "s").read_text() == "mine"

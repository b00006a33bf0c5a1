import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import naive_sparse_bitmask as naive
from tests.formats.conftest import DTYPES, random_bits
from toolkit.errors import UserError
from toolkit.formats import encode
from toolkit.formats.sparse_bitmask import PARTS, SparseBitmask


@st.composite
def matrices(draw, dtype):
    return torch.from_numpy(random_bits(draw, dtype, draw(st.integers(0, 9)), draw(st.integers(0, 80)))).view(dtype)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(data=st.data())
@pytest.mark.parametrize("dtype", naive.MINUS_ZERO, ids=str)
def test_stored_as_the_oracle_stores_and_decoded_to_the_bit(data, dtype):
    matrix = data.draw(matrices(dtype))
    packed = SparseBitmask.encode(matrix)
    bitmask, row_offsets, compressed = naive.sparse_bitmask(matrix)
    assert (packed.shape, packed.bitmask.shape) == (matrix.shape, (len(matrix), -(-matrix.shape[1] // 8)))
    assert (packed.bitmask.tolist(), packed.row_offsets.tolist()) == (bitmask, row_offsets)
    assert (packed.compressed.dtype, naive.bits(packed.compressed)) == (dtype, compressed)
    decoded = SparseBitmask.from_tensors(packed.tensors).decode()
    assert (decoded.dtype, decoded.shape) == (dtype, matrix.shape)
    assert naive.bits(decoded) == naive.dense_bits(matrix)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(data=st.data())
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_to_endor_and_back_changes_nothing(data, dtype):
    matrix = data.draw(matrices(dtype))
    endor = encode("endor", matrix)
    packed = SparseBitmask.from_endor(endor)
    again = packed.to_endor()
    again.check()
    assert again.shape == endor.shape
    for name, tensor in endor.tensors.items():
        assert naive.bits(again.tensors[name].view(torch.uint8)) == naive.bits(tensor.view(torch.uint8)), name
    for name, tensor in SparseBitmask.encode(matrix).tensors.items():
        assert naive.bits(packed.tensors[name].view(torch.uint8)) == naive.bits(tensor.view(torch.uint8)), name


def test_worked_example():
    packed = SparseBitmask.encode(torch.tensor([[1, 0, 0, 2], [0, 0, 0, 0], [0, 3, 0, 0]], dtype=torch.bfloat16))
    stored = packed.tensors
    assert tuple(stored) == PARTS
    assert {name: tensor.tolist() for name, tensor in stored.items()} == {
        "shape": [3, 4],
        "compressed": [1, 2, 3],
        "bitmask": [[0b1001], [0], [0b0010]],
        "row_offsets": [0, 2, 2],
    }
    assert {name: tensor.dtype for name, tensor in stored.items()} == {
        "shape": torch.int64,
        "compressed": torch.bfloat16,
        "bitmask": torch.uint8,
        "row_offsets": torch.int64,
    }
    assert packed.nbytes == 2 * 8 + 3 * 2 + 3 + 3 * 8


def test_a_vector_is_one_row_whose_offset_has_no_dimension():
    vector = torch.tensor([0.0, 5, 0, 0, 0, 0, 0, 0, -7])
    packed = SparseBitmask.encode(vector)
    assert (packed.bitmask.tolist(), packed.row_offsets.shape, packed.row_offsets.item()) == ([2, 1], (), 0)
    assert torch.equal(SparseBitmask.from_tensors(packed.tensors).decode(), vector)
    assert packed.to_endor().shape == (1, 9)


def test_whole_words_are_shared_with_endor():
    endor = encode("endor", torch.eye(3, 64))
    packed = SparseBitmask.from_endor(endor)
    again = packed.to_endor()
    for tensor in (packed.bitmask, again.bitmap):
        assert tensor.data_ptr() == endor.bitmap.data_ptr()
    for tensor in (packed.compressed, again.values):
        assert tensor.data_ptr() == endor.values.data_ptr()


def test_any_strides_parameters_and_no_change_to_the_input():
    matrix = torch.randn(24, 10, generator=torch.Generator().manual_seed(0)).masked_fill(torch.eye(24, 10) > 0, -0.0)
    for dtype in (torch.float16, torch.float8_e4m3fn):
        strided = torch.nn.Parameter(matrix.to(dtype), requires_grad=False).T
        before = naive.bits(strided.contiguous())
        assert naive.bits(SparseBitmask.encode(strided).decode()) == naive.dense_bits(strided.contiguous())
        assert naive.bits(strided.contiguous()) == before


def test_what_cannot_be_packed():
    for weight, told in (
        (torch.zeros(2, 3, 4), r"shape \[2, 3, 4\]"),
        (torch.zeros(2, 3, dtype=torch.float64), "float64"),
        (torch.eye(3).to_sparse(), "sparse"),
    ):
        with pytest.raises(UserError, match=told):
            SparseBitmask.encode(weight)
    with pytest.raises(UserError, match=r"'endor' holds no torch\.float8_e4m3fn"):
        SparseBitmask.encode(torch.ones(2, 3).to(torch.float8_e4m3fn)).to_endor()


SOUND = {
    "shape": torch.tensor([3, 12]),
    "compressed": torch.tensor([1.0, 2, 3]),
    "bitmask": torch.tensor([[9, 0], [0, 0], [0, 8]], dtype=torch.uint8),
    "row_offsets": torch.tensor([0, 2, 2]),
}


def test_parts_that_do_not_agree():
    """Checkpoints come from elsewhere: no part is taken at its word."""
    assert torch.count_nonzero(SparseBitmask.from_tensors(SOUND).decode()) == 3
    for part, value, told in (
        ("shape", torch.tensor([4, 12]), "bitmask is"),
        ("shape", torch.tensor([3, -12]), "expected integers from 0"),
        ("shape", torch.tensor([3, 4, 3]), "1 or 2 sizes"),
        ("shape", torch.tensor([3.0, 12.0]), "shape is"),
        ("compressed", torch.tensor([1.0, 2, 3, 4]), "row 2 has 1 bits set"),
        ("compressed", torch.tensor([1.0, 2, 3], dtype=torch.float64), "compressed is"),
        ("bitmask", torch.tensor([[9, 0], [0, 0], [0, 0]], dtype=torch.uint8), "row 2 has 0 bits set"),
        ("row_offsets", torch.tensor([0, 9, 2]), "row 0 has 2 bits set"),
        ("row_offsets", torch.tensor([0, 2, 2], dtype=torch.int32), "row_offsets is"),
    ):
        with pytest.raises(ValueError, match=told):
            SparseBitmask.from_tensors(SOUND | {part: value})

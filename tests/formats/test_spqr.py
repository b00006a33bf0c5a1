"""SpQR as a packed matrix: it decodes to what the quantiser chose, and files of it are checked."""

import dataclasses

import pytest
import torch

from tests import naive_spqr as naive
from toolkit.errors import UserError
from toolkit.formats import QUANTISED, FormatError, encode, load
from toolkit.quantization import spqr as quantiser

SHAPES = [(0, 0), (0, 8), (3, 0), (1, 1), (17, 40), (160, 64)]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.fixture(params=QUANTISED)
def form(request):
    return QUANTISED[request.param]


def weights(shape, dtype=torch.float32):
    return (torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 0.02).to(dtype)


def oracle(quantised, dtype):
    rows, columns = quantised.codes.shape
    parts = (quantised.codes.weights, quantised.codes.scales, quantised.codes.zeros, quantised.codes.second_order)
    dense = torch.from_numpy(naive.dequantise(naive.pack(*(part.tolist() for part in parts)), rows, columns)).float()
    dense[quantised.rows, quantised.columns] += quantised.values.float()
    return dense.to(dtype)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_it_decodes_to_what_was_chosen(form, dtype, shape, tmp_path):
    weight = weights(shape, dtype)
    quantised = quantiser.SpQR(0.05).round(weight)
    packed, expected = form.from_quantised(quantised, dtype), oracle(quantised, dtype)
    packed.check()
    assert (packed.shape, packed.dtype) == (shape, dtype)
    assert torch.equal(packed.decode(), expected)
    out = torch.full(shape, 7, dtype=dtype)
    assert packed.unpack_into(out) is out
    scratch = torch.empty(packed.scratch_bytes(shape, dtype), dtype=torch.uint8)
    assert torch.equal(packed.dense_in(scratch), expected)
    packed.save(tmp_path / "matrix")
    again = load(tmp_path / "matrix")
    assert type(again) is form
    assert torch.equal(again.decode(), expected)
    x = torch.linspace(-1, 1, shape[1])
    exact, found = oracle(quantised, torch.float64) @ x.double(), packed.matvec(x)
    assert found.dtype == torch.float32
    magnitude = (oracle(quantised, torch.float64).abs() + 0.1) @ x.double().abs()
    assert ((found - exact).abs() <= 2e-3 * magnitude).all()


def test_encoding_rounds_to_nearest_with_one_percent_of_outliers(form):
    weight = weights((64, 64), torch.bfloat16)
    packed, quantised = encode(form.name, weight), quantiser.SpQR().round(weight)
    assert torch.equal(packed.decode(), oracle(quantised, torch.bfloat16))
    assert len(quantised.rows) == round(0.01 * 64 * 64)
    with pytest.raises(UserError, match=r"cannot quantise a weight of torch\.int8"):
        encode(form.name, torch.zeros(4, 4, dtype=torch.int8))


def test_bits_per_weight_are_counted():
    """32 × 48 weights: 4 bits each, 33 offsets, 15 outliers; 17 columns fill two words, so 7.53 bits and more."""
    packed = encode("spqr", weights((32, 48)))
    assert packed.nbytes == 32 * 3 * 8 + 33 * 4 + 15 * 4
    assert packed.bits_per_weight == 8 * packed.nbytes / (32 * 48)
    narrow = QUANTISED["spqr"].from_quantised(quantiser.SpQR(0).round(weights((16, 17))), torch.float16)
    assert narrow.words.nbytes == 16 * 2 * 8
    with pytest.raises(UserError, match="depends on the values"):
        type(packed).expected_nbytes((32, 48), 0.5, torch.float16)


def test_files_whose_tensors_disagree_are_refused(form, tmp_path):
    """Every number in a file is bounded before a kernel sees it."""
    packed = form.from_quantised(quantiser.SpQR(0.1).round(weights((40, 24))), torch.float16)
    spare, far = packed.words.clone(), packed.col_vals.clone()
    spare[0, 0, 0] |= 1 << 62
    place = int(far.nonzero()[0])
    far[place] = (far[place] & ~0xFFFF) | 24
    falling, wrapped = packed.offsets.clone(), packed.offsets.clone()
    falling[1], wrapped[1] = 2**31 - 1, -(2**31)
    for changes, told in (
        ({"words": spare}, "bits set above bit 61"),
        ({"col_vals": far}, "column 24 of 24"),
        ({"offsets": falling}, "offsets fall"),
        ({"offsets": wrapped}, "offsets fall"),
    ):
        dataclasses.replace(packed, **changes).save(tmp_path / "bad")
        with pytest.raises(FormatError, match=f"bad: inconsistent {form.name} file: .*{told}"):
            load(tmp_path / "bad")
    for changes, told in (
        ({"shape": (41, 40)}, "words is"),
        ({"shape": (40, 1 << 40)}, "words is"),
        ({"dtype": torch.int8}, "floating-point"),
        ({"words": packed.words.int()}, "words is"),
        ({"offsets": packed.offsets[:-1]}, "offsets is"),
        ({"offsets": packed.offsets.long()}, "offsets is"),
        ({"col_vals": packed.col_vals[:-1].clone()}, "offsets do not run"),
    ):
        with pytest.raises(ValueError, match=told):
            dataclasses.replace(packed, **changes)

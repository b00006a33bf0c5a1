"""SpQR as a packed matrix: it decodes to what the quantiser chose, and files of it are checked."""

import dataclasses
import itertools

import pytest
import torch

from tests import naive_spqr as naive
from toolkit.errors import UserError
from toolkit.formats import QUANTISED, encode, expected_nbytes
from toolkit.formats.spqr import fastest
from toolkit.kernels import spqr
from toolkit.kernels.engine import tuning
from toolkit.kernels.spqr import Codes
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
    if quantised.permutation is not None:
        dense = torch.empty_like(dense).index_copy_(1, quantised.permutation, dense)
    return dense.to(dtype)


def permuted(quantised):
    """The same, as if its columns had been taken in some other order."""
    order = torch.randperm(quantised.codes.shape[1], generator=torch.Generator().manual_seed(0))
    return dataclasses.replace(quantised, permutation=order)


@pytest.mark.parametrize("order", [lambda quantised: quantised, permuted], ids=["kept", "permuted"])
def test_it_decodes_to_what_was_chosen(form, order):
    for shape, dtype in itertools.product(SHAPES, DTYPES):
        quantised = order(quantiser.SpQR(0.05).round(weights(shape, dtype)))
        packed, expected = form.from_quantised(quantised, dtype), oracle(quantised, dtype)
        packed.check()
        assert (packed.shape, packed.dtype) == (shape, dtype)
        assert torch.equal(packed.decode(), expected)
        out = torch.full(shape, 7, dtype=dtype)
        assert packed.unpack_into(out) is out
        scratch = torch.empty(packed.scratch_bytes(shape, dtype), dtype=torch.uint8)
        assert torch.equal(packed.dense_in(scratch), expected)
        x = torch.linspace(-1, 1, shape[1])
        exact, found = oracle(quantised, torch.float64) @ x.double(), packed.matvec(x)
        assert found.dtype == torch.float32
        magnitude = (oracle(quantised, torch.float64).abs() + 0.1) @ x.double().abs()
        assert ((found - exact).abs() <= 2e-3 * magnitude).all()


@pytest.mark.parametrize("columns", [40_000, 70_000])
def test_any_number_of_columns(form, columns):
    """Outliers in the first and the last column; 16 bits tell columns up to 65,535, and 32 bits those beyond."""
    sizes = (17, columns), (17, -(-columns // 16)), (17, -(-columns // 16))
    codes = [torch.randint(0, 8, size, dtype=torch.uint8, generator=torch.Generator().manual_seed(0)) for size in sizes]
    statistics = torch.tensor([0.5, 1, 2, 3]).half().expand(2, sizes[1][1], 4).contiguous()
    at = torch.tensor([0, 3, 16]), torch.tensor([0, columns - 1, columns - 1]), torch.tensor([4.0, 8.0, -2.0]).half()
    quantised = permuted(quantiser.Quantised(Codes(*codes, statistics), *at))
    packed = form.from_quantised(quantised, torch.float32)
    packed.check()
    assert packed.col_vals.itemsize == (4 if columns <= 65_536 else 8)
    weights, scales, zeros = (part.float().repeat_interleave(16 if part is not codes[0] else 1, 1) for part in codes)
    dense = (0.5 * (scales - 2))[:, :columns] * (weights - (zeros - 3)[:, :columns])
    dense[at[0], at[1]] += at[2].float()
    dense = torch.empty_like(dense).index_copy_(1, quantised.permutation, dense)
    assert torch.equal(packed.decode(), dense)
    x = torch.zeros(columns)
    x[quantised.permutation[-1]] = 1
    torch.testing.assert_close(packed.matvec(x), dense @ x, rtol=2e-3, atol=0)


def test_the_faster_storage_of_outliers_is_taken(monkeypatch):
    quantised = quantiser.SpQR(0.05).round(weights((33, 48)))
    for seconds, expected in (
        ({"spqr": 1, "spqr_ptcsr": 0.8}, "spqr_ptcsr"),
        ({"spqr": 1, "spqr_ptcsr": 0.99}, "spqr"),  # not worth its padding
        ({"spqr": 1, "spqr_ptcsr": 2}, "spqr"),
    ):
        monkeypatch.setattr(tuning, "measure", lambda runs, seconds=seconds: {name: seconds[name] for name in runs})
        found = fastest(quantised, torch.float16)
        assert found.name == expected
        assert torch.equal(found.decode(), oracle(quantised, torch.float16))
    monkeypatch.undo()
    assert fastest(quantised, torch.float16).name in QUANTISED


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
    for shape in [(32, 48), (1, 1), (33, 130)]:
        assert expected_nbytes("spqr", shape, 0.5, torch.float16) == encode("spqr", weights(shape)).nbytes


def test_tensors_that_disagree_are_refused(form):
    """Every number is bounded before a kernel sees it."""
    packed = form.from_quantised(permuted(quantiser.SpQR(0.1).round(weights((40, 24)))), torch.float16)
    codes = spqr.unpack(packed.words, packed.shape)
    codes.second_order[1, 0, 2] = torch.nan
    large = spqr.unpack(packed.words, packed.shape)
    large.weights[33], large.scales[33], large.zeros[33] = 7, 7, 7
    large.second_order[2, 1] = torch.tensor([3000, 1, 0, 0])  # s = 21,000 and z = 7: code 0 overflows, code 7 does not
    twice, beyond = packed.permutation.clone(), packed.permutation.clone()
    twice[0], beyond[0] = twice[1], 24
    for name, wrong, told in (
        ("words", packed.words | 1 << 62, "bits set above bit 61"),
        ("words", spqr.pack(codes), r"statistics of tile \(1, 0\) are not finite"),
        ("words", spqr.pack(large), "a weight of rows 0 to 39 is too large for fp16"),  # in the padding alone
        ("words", packed.words.int(), "words is"),
        ("offsets", packed.offsets.clone().index_fill_(0, torch.tensor([1]), -(2**31)), "offsets fall"),
        ("permutation", twice, "permutation does not name each of 24 columns once"),
        ("permutation", beyond, "permutation does not name each of 24 columns once"),
        ("permutation", packed.permutation.long(), "permutation is"),
        ("shape", (40, 1 << 40), "words is"),
        ("dtype", torch.int8, "floating-point"),
    ):
        with pytest.raises(ValueError, match=told):
            dataclasses.replace(packed, **{name: wrong}).check()

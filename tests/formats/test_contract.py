"""The runtime's demands of every format: unpack into memory at hand, multiply, and keep scales with their rows."""

import itertools
from itertools import cycle

import pytest
import torch

from toolkit.formats import FORMATS, READABLE, encode
from toolkit.formats.packed import DTYPES
from toolkit.formats.scaled import Scaled, unpacked
from toolkit.quantization import absmax_int8, dequantise, row_scales

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
SHAPES = [(1, 8), (3, 72), (67, 132), (200, 64)]


def two_of_four(shape, dtype):
    """A matrix that every format can hold."""
    generator = torch.Generator().manual_seed(shape[0])
    weight = torch.randint(-100, 100, shape, generator=generator)
    weight[:, 1::4] = weight[:, 3::4] = 0
    return (weight if dtype == torch.int8 else weight / 64).to(dtype)


@pytest.mark.parametrize("form", FORMATS)
def test_every_format_unpacks_into_memory_at_hand(form):
    for shape, dtype in itertools.product(SHAPES, DTYPES.values()):
        weight = two_of_four(shape, dtype)
        packed, out = encode(form, weight), torch.full_like(weight, 7)
        assert packed.unpack_into(out) is out
        assert torch.equal(out, weight)
        scratch = torch.full((packed.scratch_bytes(shape, dtype),), 7, dtype=torch.uint8)
        dense = packed.dense_in(scratch)
        assert torch.equal(dense, weight)
        assert dense.data_ptr() == (packed.values if packed.is_dense else scratch).data_ptr()


@pytest.mark.parametrize("form", sorted(FORMATS.keys() - {"two_four"}))
def test_strides_of_a_single_element_mean_nothing(form):
    """torch calls these contiguous."""
    for shape, strides in [((1, 1), (5, 7)), ((3, 1), (1, 9)), ((1, 3), (8, 1))]:
        weight = torch.arange(100.0).as_strided(shape, strides, 3)
        out = torch.zeros(100).as_strided(shape, strides, 3)
        packed, x = encode(form, weight), torch.ones(9).as_strided((shape[1],), (1 if shape[1] > 1 else 4,))
        assert torch.equal(packed.unpack_into(out), weight)
        assert torch.equal(packed.matvec(x), weight.sum(dim=1))


@pytest.mark.parametrize("form", FORMATS)
def test_products_of_every_format_are_those_of_float64(form):
    for shape, dtype in itertools.product(SHAPES, DTYPES.values()):
        weight, x = two_of_four(shape, dtype), torch.linspace(-1, 1, shape[1])
        found = encode(form, weight).matvec(x)
        assert (found.dtype, found.shape) == (torch.float32, shape[:1])
        bound = (weight.double().abs() @ x.double().abs()).max() * max(torch.finfo(torch.float16).eps, _eps(dtype))
        assert float((found.double() - weight.double() @ x.double()).abs().max()) <= 2 * float(bound)


@pytest.mark.parametrize("form", READABLE)
def test_every_format_takes_several_vectors_of_any_strides_and_type(form):
    """A state-space model hands out transposed vectors; a router may hand out none."""
    packed, x = encode(form, two_of_four((67, 132), torch.float32)), torch.linspace(-1, 1, 5 * 132).view(5, 132)
    expected = packed.matvec(x)
    assert torch.equal(packed.matvec(x.T.contiguous().T), expected)
    assert torch.equal(packed.matvec(x.repeat(1, 2)[2, :132]), packed.matvec(x[2].clone()))
    assert torch.equal(packed.matvec(torch.stack([x[2], x[1]], 1)[:, 0]), packed.matvec(x[2].clone()))
    for dtype in (torch.float64, torch.bfloat16, torch.int64):
        assert torch.equal(packed.matvec((4 * x).to(dtype)), packed.matvec((4 * x).to(dtype).float()))
    for few in (0, 1):
        assert packed.matvec(x[:few]).shape == (few, 67)


def _eps(dtype):
    return torch.finfo(dtype).eps if dtype.is_floating_point else 0


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("form", FORMATS)
def test_scales_stay_with_their_rows(form, shape):
    dtype = FLOATS[shape[0] % 3]
    integers = two_of_four(shape, torch.int8)
    scales = (torch.rand(shape[0], generator=torch.Generator().manual_seed(0)) + 0.5).to(dtype)
    weight = Scaled(encode(form, integers), scales)
    expected = integers.to(dtype) * scales[:, None]
    assert torch.equal(weight.unpack_into(torch.empty(shape, dtype=dtype)), expected)
    assert torch.equal(weight.decode(), expected)
    scratch = torch.empty(expected.nbytes + weight.stored.scratch_bytes(shape, torch.int8), dtype=torch.uint8)
    assert torch.equal(weight.dense_in(scratch), expected)
    half_decoded = unpacked(weight, torch.empty_like(integers))
    assert torch.equal(half_decoded.stored.values, integers)
    x = torch.linspace(-1, 1, shape[1])
    exact = (integers.double() * scales.double()[:, None]) @ x.double()
    for operand in (weight, half_decoded):
        found = operand.matvec(x)
        assert found.dtype == torch.float32
        assert float((found.double() - exact).abs().max()) <= 1e-4 * float(exact.abs().max() + 1)


@pytest.mark.parametrize(("form", "dtype"), list(zip(FORMATS, cycle(FLOATS), strict=False)))
def test_every_format_holds_int8_weights(form, dtype):
    weight = two_of_four((67, 132), dtype)
    weight[4] = 0
    packed = Scaled.encode(form, weight)
    assert (packed.shape, packed.dtype, packed.packed.dtype) == ((67, 132), dtype, torch.int8)
    assert torch.equal(packed.decode(), dequantise(absmax_int8(weight), row_scales(weight)))
    assert (packed.decode()[weight == 0] == 0).all()
    assert packed.nbytes == encode(form, absmax_int8(weight)).nbytes + 67 * dtype.itemsize


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_the_largest_numbers_do_not_become_infinite(dtype):
    largest = torch.finfo(dtype).max
    weight = torch.tensor([[largest, -largest, 1, 0], [0.999 * largest, 0, 0, 0]], dtype=dtype)
    found = Scaled.encode("dense", weight).decode()
    assert found.isfinite().all()
    assert ((found.double() - weight.double()).abs() <= 0.01 * weight.double().abs().amax(dim=1, keepdim=True)).all()

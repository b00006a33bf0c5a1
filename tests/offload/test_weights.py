import pytest
import torch

from toolkit.formats import encode
from toolkit.formats.packed import DTYPES
from toolkit.formats.scaled import Scaled
from toolkit.models.shapes import random_pruned
from toolkit.offload.weights import product, unpack
from toolkit.simulation.cost_model import METHODS

FORMS = sorted({method.format for method in METHODS.values()})
SHAPES = [(1, 8), (3, 70), (67, 130), (200, 64)]


@pytest.mark.parametrize("dtype", ["float16", "int8"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("form", FORMS)
def test_what_is_packed_is_unpacked_to_the_bit(form, shape, dtype):
    weight = random_pruned(shape, 0.5, DTYPES[dtype])
    assert torch.equal(unpack(encode(form, weight), torch.full_like(weight, 7)), weight)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", ["float16", "int8"])
def test_products_of_every_form_are_those_of_float64(dtype, shape):
    weight, x = random_pruned(shape, 0.5, DTYPES[dtype], seed=3), torch.linspace(-1, 1, shape[1])
    expected = weight.double() @ x.double()
    scale = float((weight.double().abs() @ x.double().abs()).max())
    for operand in (weight, encode("endor", weight)):
        found = product(operand, x)
        assert found.shape == (shape[0],)
        assert float((found.double() - expected).abs().max()) <= 2e-3 * scale


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("form", FORMS)
def test_scales_stay_with_their_rows(form, shape):
    weight, scales = random_pruned(shape, 0.5, torch.int8), torch.rand(shape[0]).half() + 0.5
    packed = Scaled(encode(form, weight), scales)
    found = unpack(packed, torch.empty_like(weight))
    assert torch.equal(found.packed.values, weight)
    assert torch.equal(found.scales, scales)
    x = torch.linspace(-1, 1, shape[1])
    for operand in (found, *((packed,) if form == "endor" else ())):
        expected = (weight.double() * scales.double()[:, None]) @ x.double()
        assert float((product(operand, x).double() - expected).abs().max()) <= 1e-3 * float(expected.abs().max() + 1)

from itertools import cycle

import pytest
import torch

from toolkit.formats import FORMATS, encode
from toolkit.formats.scaled import Scaled
from toolkit.quantization import absmax_int8, dequantise, row_scales

FLOATS = [torch.float32, torch.bfloat16, torch.float16]


def two_of_four(dtype=torch.float32):
    """A matrix that every format can hold, a row of zeros included."""
    weight = torch.randn(9, 64, generator=torch.Generator().manual_seed(0))
    weight.view(9, 16, 4)[..., 1::2] = 0
    weight[4] = 0
    return weight.to(dtype)


@pytest.mark.parametrize(("form", "dtype"), list(zip(FORMATS, cycle(FLOATS), strict=False)))
def test_every_format_holds_int8_weights(form, dtype):
    weight = two_of_four(dtype)
    packed = Scaled.encode(form, weight)
    assert (packed.shape, packed.dtype, packed.packed.dtype) == ((9, 64), dtype, torch.int8)
    assert torch.equal(packed.decode(), dequantise(absmax_int8(weight), row_scales(weight)))
    assert (packed.decode()[weight == 0] == 0).all()
    assert packed.nbytes == encode(form, absmax_int8(weight)).nbytes + 9 * dtype.itemsize


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_the_largest_numbers_do_not_become_infinite(dtype):
    largest = torch.finfo(dtype).max
    weight = torch.tensor([[largest, -largest, 1, 0], [0.999 * largest, 0, 0, 0]], dtype=dtype)
    found = Scaled.encode("dense", weight).decode()
    assert found.isfinite().all()
    assert ((found.double() - weight.double()).abs() <= 0.01 * weight.double().abs().amax(dim=1, keepdim=True)).all()

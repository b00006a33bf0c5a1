import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests import naive_quantization as naive
from toolkit.quantization import absmax_int8, dequantise, row_scales

FLOATS = [torch.float32, torch.bfloat16, torch.float16]


def random(shape, dtype, seed=0):
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) / 50
    return weight.masked_fill_(weight.abs() < 0.01, 0).to(dtype)


def test_by_hand():
    weight = torch.tensor([[127.0, -63.4, 0.0], [0.0, 0.0, 0.0], [1.27, 0.004, -1.27]])
    assert row_scales(weight).tolist() == pytest.approx([1, 1, 0.01])
    assert absmax_int8(weight).tolist() == [[127, -63, 0], [0, 0, 0], [127, 0, -127]]


@pytest.mark.parametrize("dtype", FLOATS)
@given(shape=st.tuples(st.integers(1, 9), st.integers(1, 40)), seed=st.integers(0, 99))
def test_it_is_what_plain_python_gives(dtype, shape, seed):
    weight = random(shape, dtype, seed)
    values, scales = naive.int8(weight)
    assert torch.equal(row_scales(weight), scales)
    assert int((absmax_int8(weight).int() - values.int()).abs().max()) <= (dtype == torch.float32)  # a tie in float32
    assert (absmax_int8(weight) != values).float().mean() < 0.05


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_weight_is_rounded_once_and_by_half_a_step_at_most(dtype):
    weight = random((40, 300), dtype)
    values, scales = absmax_int8(weight), row_scales(weight)
    found = dequantise(values, scales)
    assert torch.equal(found, (values.double() * scales.double()[:, None]).to(dtype))
    rounding = torch.finfo(dtype).eps * weight.float().abs().amax(dim=1, keepdim=True)
    assert ((found.float() - weight.float()).abs() <= 0.5 * scales.float()[:, None] + rounding).all()
    assert (found[weight == 0] == 0).all()

"""Groupwise integers by the package hqq: bytes, range, and what they decode to."""

import pytest
import torch

from toolkit.errors import UserError
from toolkit.quantization.hqq import BITS, GROUP, Groupwise


@pytest.fixture(scope="module")
def weight():
    return torch.randn(24, 2 * GROUP, generator=torch.Generator().manual_seed(0)) * 0.02


def plain_error(weight, bits):
    """Round to the nearest of 2^bits even steps between the least and the greatest weight of a group."""
    groups = weight.view(-1, GROUP)
    low, high = groups.amin(1, keepdim=True), groups.amax(1, keepdim=True)
    step = (high - low) / (2**bits - 1)
    return ((groups - low).div(step).round() * step + low - groups).abs().pow(0.7).mean()


@pytest.mark.parametrize("bits", BITS)
def test_bytes_and_error(weight, bits):
    packed = Groupwise.encode(weight, bits)
    groups = weight.numel() // GROUP
    per_int32 = -(-groups // 10) * GROUP * 4  # 3 bits: ten groups' integers in a row of int32
    assert packed.values.nbytes == (per_int32 if bits == 3 else weight.numel() * bits // 8)
    assert packed.nbytes == packed.values.nbytes + groups * 2 * 2  # scale and zero point in 16 bits
    decoded = packed.decode()
    assert decoded.shape == weight.shape
    # each group takes few values
    assert all(len(group.unique()) <= 2**bits for group in decoded.view(-1, GROUP))
    # the method minimises |error|^0.7: not worse than plain rounding, but for what 16-bit scales cost
    assert (decoded - weight).abs().pow(0.7).mean() <= plain_error(weight, bits) * (1.01 if bits < 8 else 1.3)


def test_fewer_bits_lose_more(weight):
    errors = [(Groupwise.encode(weight, bits).decode() - weight).norm().item() for bits in BITS]
    assert errors == sorted(errors, reverse=True)


def test_a_group_of_one_value_and_bfloat16(weight):
    constant = torch.full((2, GROUP), 0.5)
    torch.testing.assert_close(Groupwise.encode(constant, 4).decode(), constant, rtol=1e-3, atol=1e-3)
    assert Groupwise.encode(weight.bfloat16(), 4).decode().isfinite().all()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"bits": 5}, "unknown number of bits"),
        ({"group": 48}, "groups of 48 do not divide 128 columns"),
    ],
)
def test_bad_input(weight, change, words):
    with pytest.raises(UserError, match=words):
        Groupwise.encode(weight, **change)


def test_a_last_byte_that_is_not_full(weight):
    with pytest.raises(UserError, match="1 groups of 4 bits do not fill whole bytes"):
        Groupwise.encode(weight[:1, :GROUP])


def test_a_weight_that_is_not_finite(weight):
    broken = weight.clone()
    broken[0, 0] = float("inf")
    with pytest.raises(UserError, match="not finite"):
        Groupwise.encode(broken)

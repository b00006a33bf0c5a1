"""Groupwise integers by the package hqq: bytes, range, and what they decode to."""

import pytest
import torch

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

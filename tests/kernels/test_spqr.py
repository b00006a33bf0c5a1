"""SpQR's words against the oracle: to the bit when packed and decoded, and multiplied by every backend."""

import itertools

import numpy as np
import pytest
import torch

from tests import naive_spqr as naive
from tests.kernels.families import (
    EXACT,
    codes,
    decoded,
    each_with_one,
    judge_spqr,
    outliers,
    rounded_activations,
    spqr_magnitude,
    wild,
)
from toolkit.kernels import csr, spqr

SHAPES = [(0, 0), (0, 16), (3, 0), (1, 1), (16, 16), (17, 15), (40, 70), (31, 300)]


with_outliers = pytest.mark.parametrize(("backend", "storage"), each_with_one(spqr.BACKENDS.available(), csr.STORAGES))


def test_packed_as_the_oracle_packs():
    for shape in SHAPES:
        given = codes(shape)
        words = spqr.pack(given)
        spqr.check(words, shape)
        assert words.shape == (*spqr.tiles(shape), 16)
        unsigned = words.flatten().numpy().view(np.uint64).tolist()
        parts = (given.weights, given.scales, given.zeros, given.second_order)
        assert unsigned == naive.pack(*(part.tolist() for part in parts))
        found = spqr.unpack(words, shape)
        for part, back in zip(parts, (found.weights, found.scales, found.zeros, found.second_order), strict=True):
            assert torch.equal(part, back)


def test_worked_word():
    """Statistics 1, 2, 0.5 and −1 are 0x3C00, 0x4000, 0x3800 and 0xBC00 in fp16; row 1 carries byte 0, row 2 byte 1."""
    weights = torch.zeros(3, 16, dtype=torch.uint8)
    weights[2, 0], weights[2, 1], weights[2, 15] = 3, 7, 5
    scales, zeros = torch.tensor([[0], [0], [6]]).byte(), torch.tensor([[0], [0], [2]]).byte()
    words = spqr.pack(spqr.Codes(weights, scales, zeros, torch.tensor([[[1, 2, 0.5, -1]]]).half()))
    assert words[0, 0, 2].item() == 6 | 2 << 3 | 3 << 6 | 7 << 9 | 5 << 51 | 0x3C << 54
    assert words[0, 0, [0, 1, 4, 6, 15]].tolist() == [byte << 54 for byte in (0x00, 0x00, 0x00, 0x40, 0xBC)]
    scale, zero = 1 * (6 - 0.5), 2 * (2 + 1)
    dense = spqr.decode(words, csr.no_outliers((3, 16)))
    assert dense[2, [0, 1, 2, 15]].tolist() == [scale * (q - zero) for q in (3, 7, 0, 5)]


@with_outliers
def test_statistics_of_any_size_are_rounded_as_fp16_does(backend, storage):
    """To the sign of zeros, which neither outliers nor what pads them may change."""
    words, packed = spqr.pack(wild((100, 20))), outliers((100, 20), 0.1, storage)
    found, expected = spqr.decode(words, packed, backend=backend), decoded(words, packed)
    assert torch.equal(found.nan_to_num(12345.0), expected.nan_to_num(12345.0))
    numbers = ~expected.isnan()
    assert (expected[:, 0].signbit() & (expected[:, 0] == 0)).any(), "where padding lies"
    assert torch.equal(found[numbers].signbit(), expected[numbers].signbit())


@with_outliers
def test_products_of_statistics_of_any_size(backend, storage):
    """Rows with a weight that is not finite are left out: they have no product. Padding counts as weights of code 0."""
    for seed, shape in enumerate([(4, 1)] * 8 + [(20, 20)]):
        words, packed = spqr.pack(wild(shape, seed)), outliers(shape, 0.1, storage, seed)
        x, dense = torch.randn(1, shape[1], generator=torch.Generator().manual_seed(seed)), decoded(words, packed)
        padded = outliers((shape[0], 16 * words.shape[1]), 0, storage)
        finite = (spqr.decode(words, padded, backend=backend).isfinite().all(1) & dense.isfinite().all(1)).numpy()
        expected, allowed = judge_spqr((words, packed), x, backend)
        error = (spqr.matvec(words, packed, x, backend=backend) - expected).abs()
        assert (error <= allowed)[:, finite].all(), seed


@with_outliers
def test_weights_below_the_least_of_fp16(backend, storage):
    """s = 2⁻¹⁶ and z = 3 · 2⁻¹⁰: s · (0 − z) is ¾ of fp16's least number, to which `decode` rounds it."""
    zero = torch.zeros(4, 1, dtype=torch.uint8)
    statistics = torch.tensor([2.0**-16, 3 * 2.0**-10, -1, -1]).half()
    words, packed = spqr.pack(spqr.Codes(zero, zero, zero, statistics.view(1, 1, 4))), outliers((4, 1), 0, storage)
    assert spqr.decode(words, packed, backend=backend).unique().tolist() == [-(2.0**-24)]
    product = spqr.matvec(words, packed, torch.ones(1), backend=backend)
    expected = -(2.0**-24) if backend in EXACT else -0.75 * 2.0**-24
    torch.testing.assert_close(product, torch.full((4,), expected), rtol=1e-3, atol=0)


@pytest.mark.skipif("avx512_int16" not in spqr.BACKENDS.available(), reason="needs AVX-512 with VBMI and VNNI")
def test_sixteen_bits_differ_from_fp32_by_the_rounding_of_activations_alone():
    """Activations are alike, or one of sixteen is far larger."""
    for seed, (shape, spread) in enumerate(itertools.product([(1, 1), (40, 70), (31, 300)], (1, 1e4))):
        words, packed = spqr.pack(codes(shape, seed)), outliers(shape)
        x = torch.randn(5, shape[1], generator=torch.Generator().manual_seed(seed))
        x[:, ::16] *= spread
        found, expected = (spqr.matvec(words, packed, x, backend=name) for name in ("avx512_int16", "avx2"))
        most = 2e-6 * spqr_magnitude(words, packed, x) + rounded_activations(words, packed, x)
        assert ((found - expected).abs() <= most).all(), shape


@with_outliers
def test_small_numbers_are_multiplied_exactly(backend, storage):
    """All roundings are exact for small integers, so every backend gives the same."""
    given = codes((33, 50))
    whole = torch.tensor([1, 1, 2, 3]).half().expand(*spqr.tiles((33, 50)), 4).contiguous()
    words = spqr.pack(spqr.Codes(given.weights, given.scales, given.zeros, whole))
    rows = torch.arange(33)
    packed = csr.encode(storage, (33, 50), rows, rows, rows.half() + 1)
    x = torch.randint(-3, 4, (2, 50), generator=torch.Generator().manual_seed(0)).float()
    x[:, ::16] = 127  # so that integers hold every activation as it is
    assert torch.equal(spqr.matvec(words, packed, x, backend=backend), x @ decoded(words, packed).T)


def test_words_that_cannot_be_are_refused():
    words = spqr.pack(codes((17, 40)))
    spqr.check(words, (17, 40))
    for place, bits, told in (
        ((0, 0, 3), 1 << 62, "bits set above bit 61"),
        ((0, 1, 5), 1 << 54, "different copies"),
        ((1, 0, 1), 1, "rows beyond the last, 16"),
        ((0, 2, 3), 1 << 6 + 3 * 8, "columns beyond the last, 39"),
    ):
        spoiled = words.clone()
        spoiled[place] ^= bits
        with pytest.raises(ValueError, match=told):
            spqr.check(spoiled, (17, 40))
    given = codes((16, 16))
    for number in (float("nan"), float("inf")):
        bad = given.second_order.clone()
        bad[0, 0, 2] = number
        with pytest.raises(ValueError, match=r"statistics of tile \(0, 0\) are not finite"):
            spqr.check(spqr.pack(spqr.Codes(given.weights, given.scales, given.zeros, bad)), (16, 16))

"""SpQR's words against the oracle: to the bit when packed and decoded, and multiplied by every backend."""

import numpy as np
import pytest
import torch

from tests import naive_spqr as naive
from tests.kernels.families import each_backend
from tests.kernels.test_bitmap import at_the_end_of_memory
from toolkit.errors import UserError
from toolkit.kernels import csr, spqr
from toolkit.kernels.runtime import backends

SHAPES = [(0, 0), (0, 16), (3, 0), (1, 1), (16, 16), (17, 15), (40, 70), (31, 300)]
EXACT = ["avx2_table", "avx2_arithmetic", "table", "arithmetic"]
STEPS = 127 * 256  # of an activation in 16 bits, from 0 to the largest of a tile


backend = each_backend(spqr)


def codes(shape, seed=0):
    """Random codes and statistics, such that weights are of the order of 1."""
    generator = torch.Generator().manual_seed(seed)
    tall, wide = spqr.tiles(shape)
    found = [
        torch.randint(0, 8, size, generator=generator, dtype=torch.uint8)
        for size in (shape, (shape[0], wide), (shape[0], wide))
    ]
    second_order = torch.randn(tall, wide, 4, generator=generator) * torch.tensor([0.1, 0.5, 2, 1])
    return spqr.Codes(*found, second_order.half())


def wild(shape, seed=0):
    """The same with statistics of any finite bits: subnormals, numbers that overflow fp16, ties.

    In each second row of tiles, s = −code, so that a weight with q = z is −0.
    """
    given, generator = codes(shape, seed), torch.Generator().manual_seed(seed)
    bits = torch.randint(0, 1 << 16, given.second_order.shape, generator=generator).to(torch.uint16)
    second_order = bits.view(torch.float16).nan_to_num(0.0, 1.0, -1.0)
    second_order[1::2] = torch.tensor([-1, 1, 0, 0])
    return spqr.Codes(given.weights, given.scales, given.zeros, second_order)


def outliers(shape, share=0.1, storage="csr", seed=0):
    generator = torch.Generator().manual_seed(seed)
    rows, columns = (torch.rand(shape, generator=generator) < share).nonzero(as_tuple=True)
    return csr.encode(storage, shape, rows, columns, torch.randn(len(rows), generator=generator).half())


def oracle(words, packed):
    dense = naive.dequantise(words.flatten().numpy().view(np.uint64).tolist(), *packed.shape)
    dense = torch.from_numpy(dense).float()
    rows, columns, values = packed.entries()
    dense[rows, columns] += values.float()
    return dense


def bound(words, packed, x):
    """Σ (|s q| + |s z| + |outlier|) |x|, to which the products' errors are relative."""
    found = spqr.unpack(words, packed.shape)
    scale_scale, zero_scale, scale_zero, zero_zero = found.second_order.repeat_interleave(16, 0).unbind(-1)
    scale_scale, zero_scale, scale_zero, zero_zero = (
        part[: packed.shape[0]] for part in (scale_scale, zero_scale, scale_zero, zero_zero)
    )
    scales = (scale_scale * (found.scales.half() - scale_zero)).double().abs()
    zeros = (zero_scale * (found.zeros.half() - zero_zero)).double().abs()
    each = [part.repeat_interleave(16, 1)[:, : packed.shape[1]] for part in (scales, zeros)]
    magnitude = each[0] * (found.weights + each[1])
    rows, columns, values = packed.entries()
    magnitude[rows, columns] += values.double().abs()
    return x.double().abs() @ magnitude.T


@pytest.mark.parametrize("shape", SHAPES)
def test_packed_as_the_oracle_packs(shape):
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


@pytest.mark.parametrize("storage", csr.STORAGES)
@pytest.mark.parametrize("shape", SHAPES)
def test_decoded_as_the_oracle_decodes(backend, shape, storage):
    for seed, share in enumerate((0, 0.1, 1)):
        words, packed = spqr.pack(codes(shape, seed)), outliers(shape, share, storage)
        out = torch.full(shape, 7.0)
        assert spqr.decode(words, packed, out, backend) is out
        assert torch.equal(out, oracle(words, packed))


@pytest.mark.parametrize("storage", csr.STORAGES)
def test_statistics_of_any_size_are_rounded_as_fp16_does(backend, storage):
    """To the sign of zeros, which neither outliers nor what pads them may change."""
    words, packed = spqr.pack(wild((100, 20))), outliers((100, 20), 0.1, storage)
    found, expected = spqr.decode(words, packed, backend=backend), oracle(words, packed)
    assert torch.equal(found.nan_to_num(12345.0), expected.nan_to_num(12345.0))
    numbers = ~expected.isnan()
    assert (expected[:, 0].signbit() & (expected[:, 0] == 0)).any(), "where padding lies"
    assert torch.equal(found[numbers].signbit(), expected[numbers].signbit())


@pytest.mark.parametrize("storage", csr.STORAGES)
def test_products_of_statistics_of_any_size(backend, storage):
    """Rows with a weight that is not finite are left out: they have no product. Padding counts as weights of code 0."""
    for seed, shape in enumerate([(4, 1)] * 20 + [(20, 20)] * 2):
        words, packed = spqr.pack(wild(shape, seed)), outliers(shape, 0.1, storage, seed)
        x, dense = torch.randn(1, shape[1], generator=torch.Generator().manual_seed(seed)), oracle(words, packed)
        padded = csr.no_outliers((shape[0], 16 * words.shape[1]))
        finite = (spqr.decode(words, padded, backend=backend).isfinite().all(1) & dense.isfinite().all(1)).numpy()
        error = (spqr.matvec(words, packed, x, backend=backend) - x.double() @ dense.double().T).abs()
        assert (error <= allowed(backend, words, packed, x))[:, finite].all(), seed


def test_weights_below_the_least_of_fp16(backend):
    """s = 2⁻¹⁶ and z = 3 · 2⁻¹⁰: s · (0 − z) is ¾ of fp16's least number, to which `decode` rounds it."""
    zero = torch.zeros(4, 1, dtype=torch.uint8)
    statistics = torch.tensor([2.0**-16, 3 * 2.0**-10, -1, -1]).half()
    words, packed = spqr.pack(spqr.Codes(zero, zero, zero, statistics.view(1, 1, 4))), csr.no_outliers((4, 1))
    assert spqr.decode(words, packed, backend=backend).unique().tolist() == [-(2.0**-24)]
    product = spqr.matvec(words, packed, torch.ones(1), backend=backend)
    expected = -(2.0**-24) if backend in EXACT else -0.75 * 2.0**-24
    torch.testing.assert_close(product, torch.full((4,), expected), rtol=1e-3, atol=0)


@pytest.mark.parametrize("storage", csr.STORAGES)
@pytest.mark.parametrize("batch", [1, 2, 5, 16])
def test_products(backend, batch, storage):
    for seed, shape in enumerate(SHAPES):
        words, packed = spqr.pack(codes(shape, seed)), outliers(shape, 0.1, storage)
        x = torch.randn(batch, shape[1], generator=torch.Generator().manual_seed(seed))
        found = spqr.matvec(words, packed, x, backend=backend)
        assert (found.dtype, found.shape) == (torch.float32, (batch, shape[0]))
        expected = x.double() @ oracle(words, packed).double().T
        assert ((found - expected).abs() <= allowed(backend, words, packed, x)).all(), shape


def allowed(backend, words, packed, x):
    """How far a backend's product may be from that of the decoded weights."""
    if backend in EXACT:
        return 1e-6 * bound(words, packed, x)
    unrounded = 2**-10 * bound(words, packed, x) + 2**-25 * x.abs().sum(1, keepdim=True, dtype=torch.float64)
    return unrounded + (rounded_activations(words, packed, x) if backend.endswith("int16") else 0)


def rounded_activations(words, packed, x):
    """How far a product is off, at most, if each activation is off by half a step."""
    if not x.shape[1]:
        return 0.0
    largest = torch.nn.functional.pad(x.abs(), (0, -x.shape[1] % 16)).view(len(x), -1, 16).amax(-1)
    return bound(words, packed, largest.repeat_interleave(16, -1)[:, : x.shape[1]]) / (2 * STEPS)


@pytest.mark.skipif("avx512_int16" not in spqr.available(), reason="needs AVX-512 with VBMI and VNNI")
@pytest.mark.parametrize("spread", [1, 1e4], ids=["alike", "one far larger"])
def test_sixteen_bits_differ_from_fp32_by_the_rounding_of_activations_alone(spread):
    for seed, shape in enumerate([(1, 1), (40, 70), (31, 300)]):
        words, packed = spqr.pack(codes(shape, seed)), outliers(shape)
        x = torch.randn(5, shape[1], generator=torch.Generator().manual_seed(seed))
        x[:, ::16] *= spread
        found, expected = (spqr.matvec(words, packed, x, backend=name) for name in ("avx512_int16", "avx2"))
        most = 2e-6 * bound(words, packed, x) + rounded_activations(words, packed, x)
        assert ((found - expected).abs() <= most).all(), shape


def test_small_numbers_are_multiplied_exactly(backend):
    """All roundings are exact for small integers, so every backend gives the same."""
    given = codes((33, 50))
    whole = torch.tensor([1, 1, 2, 3]).half().expand(*spqr.tiles((33, 50)), 4).contiguous()
    words = spqr.pack(spqr.Codes(given.weights, given.scales, given.zeros, whole))
    rows = torch.arange(33)
    packed = csr.encode("ptcsr", (33, 50), rows, rows, rows.half() + 1)
    x = torch.randint(-3, 4, (2, 50), generator=torch.Generator().manual_seed(0)).float()
    x[:, ::16] = 127  # so that integers hold every activation as it is
    assert torch.equal(spqr.matvec(words, packed, x, backend=backend), x @ oracle(words, packed).T)


def test_one_vector_fills_out_and_neither_batch_nor_threads_change_a_sum(backend):
    shape = (1600, 400)
    words, packed = spqr.pack(codes(shape)), outliers(shape, 0.01)
    x = torch.randn(7, 400, generator=torch.Generator().manual_seed(0))  # more than any backend takes at once
    out = torch.full((1600,), 3.0)
    assert spqr.matvec(words, packed, x[0], out, backend) is out
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found += [spqr.matvec(words, packed, x, backend=backend)]
            found += [torch.stack([spqr.matvec(words, packed, vector, backend=backend) for vector in x])]
    finally:
        torch.set_num_threads(before)
    assert torch.equal(out, found[0][0])
    assert all(torch.equal(found[0], other) for other in found[1:])


def test_nothing_is_read_beyond_the_words(backend):
    words, packed = spqr.pack(codes((40, 70))), outliers((40, 70))
    x = torch.randn(2, 70)
    end = at_the_end_of_memory(words)
    found = spqr.matvec(end, packed, x, backend=backend)
    assert torch.equal(found, spqr.matvec(words, packed, x, backend=backend))
    assert torch.equal(spqr.decode(end, packed, backend=backend), oracle(words, packed))


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
    with pytest.raises(ValueError, match=r"weights hold the code \d+; expected 0 to 7"):
        spqr.Codes(given.weights + 8, given.scales, given.zeros, given.second_order)
    with pytest.raises(ValueError, match="scales is torch"):
        spqr.Codes(given.weights, given.scales[:3], given.zeros, given.second_order)


def test_wrong_arguments_are_refused(monkeypatch):
    words, packed = spqr.pack(codes((17, 40))), csr.no_outliers((17, 40))
    with pytest.raises(ValueError, match=r"words is torch\.int64"):
        spqr.matvec(words[:1], packed, torch.ones(40))
    with pytest.raises(ValueError, match=r"words is torch\.int32"):
        spqr.decode(words.int(), packed)
    with pytest.raises(ValueError, match=r"x is torch.float32 \[48\]; expected torch.float32 \[40\]"):
        spqr.matvec(words, packed, torch.ones(48))
    with pytest.raises(ValueError, match=r"out is torch.float32 \[16\]; expected torch.float32 \[17\]"):
        spqr.matvec(words, packed, torch.ones(40), torch.ones(16))
    with pytest.raises(UserError, match="unknown backend 'lut'; choose from: arithmetic, auto, avx2, avx2_arithmetic"):
        spqr.matvec(words, packed, torch.ones(40), backend="lut")
    monkeypatch.setattr(backends, "host_has", lambda feature: feature != "f16c")
    with pytest.raises(UserError, match="backend 'avx2' needs a CPU with f16c; this one can run: table, arithmetic"):
        spqr.matvec(words, packed, torch.ones(40), backend="avx2")
    assert spqr.matvec(words, packed, torch.ones(16, 40)).shape == (16, 17), "auto takes what the CPU can run"

"""The CUDA kernels of SpQR and of outliers against the oracle. `test_cuda.py` runs this file: in the simulator,
which takes tensors on the CPU, and on a GPU where there is one, with larger matrices added."""

import pytest
import torch

from tests.kernels.families import DEVICE, SIMULATED, codes, decoded, outliers, random, spqr_magnitude
from toolkit.formats.spqr import SpQRMatrix, SpQRTransposed
from toolkit.kernels import csr, spqr
from toolkit.kernels.csr import layout
from toolkit.kernels.spqr import cuda as kernels

SMALL = [(3, 0), (1, 1), (17, 18)]
LARGE = [] if SIMULATED else [(16, 15), (300, 5000), (4096, 4096), (100, 40_000), (33, 70_000)]
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]


@pytest.fixture(params=spqr.FOR_GPUS)
def backend(request):
    return request.param


@pytest.fixture(params=csr.STORAGES)
def storage(request):
    return request.param


def matrix(shape, share=0.1, storage="csr", seed=0):
    return spqr.pack(codes(shape, seed)), outliers(shape, share, storage, seed)


def multiplied(words, packed, x, backend="cuda_table"):
    return spqr.matvec(words.to(DEVICE), packed.to(DEVICE), x.to(DEVICE), backend=backend).cpu()


def is_product(y, words, packed, x):
    """Whether `y` is the product up to rounding in fp32."""
    assert (y.dtype, y.shape) == (torch.float32, (len(x), packed.shape[0]))
    expected = x.double() @ decoded(words, packed).double().T
    return bool(((y - expected).abs() <= 1e-6 * spqr_magnitude(words, packed, x)).all())


def test_decoded_as_the_oracle_decodes(backend, storage):
    for seed, shape in enumerate(SMALL + LARGE):
        words, packed = matrix(shape, 0.1, storage, seed)
        dtype = DTYPES[seed % len(DTYPES)]
        out = torch.full(shape, 7.0, dtype=dtype, device=DEVICE)
        assert spqr.decode(words.to(DEVICE), packed.to(DEVICE), out, backend) is out
        assert torch.equal(out.cpu(), decoded(words, packed).to(dtype)), shape


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_row_full_of_outliers_and_none(dtype, storage):
    for share in (0, 1):
        words, packed = matrix((2, 18), share, storage)
        out = torch.empty(2, 18, dtype=dtype, device=DEVICE)
        found = spqr.decode(words.to(DEVICE), packed.to(DEVICE), out, "cuda_table")
        assert torch.equal(found.cpu(), decoded(words, packed).to(dtype))
        x = random(1, 18).to(dtype)
        assert is_product(multiplied(words, packed, x), words, packed, x.float())


def test_statistics_of_any_size_are_rounded_as_fp16_does(backend):
    """Subnormals, numbers that overflow fp16, and ties."""
    given, generator = codes((16, 32), 3), torch.Generator().manual_seed(3)
    bits = torch.randint(0, 1 << 16, given.second_order.shape, generator=generator).to(torch.uint16)
    second_order = bits.view(torch.float16).nan_to_num(0.0, 1.0, -1.0)
    words = spqr.pack(spqr.Codes(given.weights, given.scales, given.zeros, second_order))
    packed = csr.no_outliers((16, 32))
    found = spqr.decode(words.to(DEVICE), packed.to(DEVICE), backend=backend).cpu()
    assert torch.equal(found.nan_to_num(12345.0), decoded(words, packed).nan_to_num(12345.0))


def test_more_than_sixteen_vectors_and_one_alone():
    words, packed = matrix((3, 20))
    x = random(17, 20)
    found = multiplied(words, packed, x)
    assert is_product(found, words, packed, x)
    assert torch.equal(multiplied(words, packed, x[0]), found[0])
    out = x.to(DEVICE)[0, :3].clone()
    small = spqr.pack(codes((3, 3)))
    expected = multiplied(small, outliers((3, 3)), out.cpu())
    assert torch.equal(
        spqr.matvec(small.to(DEVICE), outliers((3, 3)).to(DEVICE), out, out, "cuda_table").cpu(), expected
    )


@pytest.mark.parametrize("multiprocessors", [0, 10_000])
def test_any_number_of_warps_to_a_tile_row(multiprocessors, storage, monkeypatch):
    """Two tile rows in a thread block, and two warps that share one."""
    monkeypatch.setattr(kernels, "multiprocessors", lambda device: multiprocessors)
    words, packed = matrix((17, 66), 0.2, storage)
    x = random(2, 66)
    assert is_product(multiplied(words, packed, x), words, packed, x)
    found = spqr.decode(words.to(DEVICE), packed.to(DEVICE), backend="cuda_table")
    assert torch.equal(found.cpu(), decoded(words, packed))


@pytest.mark.parametrize("batch", [1, 2])
def test_columns_that_fill_shared_memory_more_than_once(batch, storage, monkeypatch):
    for name in ("FLOATS_AT_ONCE", "TILES_DECODED"):
        monkeypatch.setattr(kernels, name, {"FLOATS_AT_ONCE": 64, "TILES_DECODED": 2}[name])
    monkeypatch.setattr(kernels, "WARPS", 1)
    for cached in (kernels.matvec_kernel, kernels.decode_kernel):
        cached.cache_clear()
    words, packed = matrix((3, 130), 0.3, storage)
    x = random(batch, 130)
    assert is_product(multiplied(words, packed, x), words, packed, x)
    assert torch.equal(
        spqr.decode(words.to(DEVICE), packed.to(DEVICE), backend="cuda_table").cpu(), decoded(words, packed)
    )
    for cached in (kernels.matvec_kernel, kernels.decode_kernel):
        cached.cache_clear()


def test_columns_told_by_32_bits(storage, monkeypatch):
    monkeypatch.setattr(layout, "NARROW_COLUMNS", 20)
    words, packed = matrix((3, 25), 0.2, storage)
    assert packed.col_vals.dtype == torch.int64
    x = random(1, 25)
    assert is_product(multiplied(words, packed, x), words, packed, x)
    found = spqr.decode(words.to(DEVICE), packed.to(DEVICE), backend="cuda_table")
    assert torch.equal(found.cpu(), decoded(words, packed))


def test_outliers_alone_in_any_column(storage):
    for columns, far in ((65_536, [32_767, 32_768, 65_535]), (70_000, [3, 65_536, 69_999])):
        values = torch.tensor([1.5, -2, 2**-24, 7]).half()
        packed = csr.encode(storage, (3, columns), torch.tensor([0, 0, 2, 1]), torch.tensor([5, *far]), values)
        x = random(3, columns)
        expected = csr.add_matvec(packed, x, torch.ones(3, 3), "portable")
        found = csr.add_matvec(packed.to(DEVICE), x.to(DEVICE), torch.ones(3, 3, device=DEVICE), "cuda")
        assert torch.allclose(found.cpu(), expected, rtol=1e-6, atol=1e-6)


def test_wild_offsets_and_columns_are_never_followed(storage):
    """Contents that no writer makes. The simulator checks every index; on a GPU a read outside can end the context."""
    for wild in (-(1 << 31), -1, 3, (1 << 31) - 1):
        for field in ("offsets", "col_vals"):
            words, packed = matrix((3, 17), 0.5, storage)
            packed, words = packed.to(DEVICE), words.to(DEVICE)
            getattr(packed, field)[1:] = wild
            spqr.decode(words, packed, backend="cuda_table")


@pytest.mark.parametrize(("form", "reordered"), [(SpQRMatrix, True), (SpQRTransposed, False)])
def test_a_packed_matrix_is_decoded_and_multiplied_where_it_is(form, reordered, monkeypatch):
    words, others = matrix((18, 40), storage="csr" if form is SpQRMatrix else "ptcsr")
    order = torch.randperm(40, generator=torch.Generator().manual_seed(1)).int() if reordered else None
    packed = form((18, 40), torch.float16, words, others.offsets, others.col_vals, order)
    dense = decoded(packed.words, packed.outliers)
    dense = dense if order is None else dense[:, order.argsort()]
    there = form.of_parts(packed.shape, packed.dtype, {name: part.to(DEVICE) for name, part in packed.tensors.items()})
    if SIMULATED:  # where no tensor is on a GPU
        monkeypatch.setattr(spqr, "choose", lambda *_, **__: "cuda_table")
    out = torch.empty(18, 40, dtype=torch.float16, device=DEVICE)
    assert torch.equal(there.unpack_into(out).cpu(), dense.half())
    x = random(1, 40)[0]
    allowed = 1e-5 * dense.double().abs() @ x.double().abs() + 1e-7
    assert ((there.matvec(x.to(DEVICE)).cpu() - dense.double() @ x.double()).abs() <= allowed).all()


@pytest.mark.skipif(SIMULATED, reason="the simulator's kernels take tensors on the CPU")
def test_backends_of_the_cpu_refuse_tensors_on_a_gpu():
    words, packed = (part.to(DEVICE) for part in matrix((3, 20)))
    with pytest.raises(ValueError, match="backend 'avx2' works on the CPU; these tensors are on cuda:0"):
        spqr.decode(words, packed, backend="avx2")
    with pytest.raises(ValueError, match="x must be contiguous and on cuda:0"):
        spqr.matvec(words, packed, torch.ones(20))

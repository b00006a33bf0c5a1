"""The CUDA kernels of SpQR and of outliers against the oracle. `test_cuda.py` runs this file: in the simulator,
which takes tensors on the CPU, and on a GPU where there is one, with larger matrices added."""

from functools import cache

import pytest
import torch

from tests.kernels.families import DEVICE, SIMULATED, codes, decoded, outliers, random, spqr_magnitude, wild
from toolkit.formats.spqr import SpQRMatrix, SpQRTransposed
from toolkit.kernels import csr, spqr
from toolkit.kernels.csr import layout
from toolkit.kernels.spqr import cuda as kernels


@pytest.fixture(params=csr.STORAGES)
def storage(request):
    return request.param


def matrix(shape, share=0.1, storage="csr", seed=0):
    return spqr.pack(codes(shape, seed)), outliers(shape, share, storage, seed)


def multiplied(words, packed, x, out=None):
    return spqr.matvec(words.to(DEVICE), packed.to(DEVICE), x.to(DEVICE), out, "cuda_table").cpu()


def check(words, packed, *batches):
    """Products are right up to rounding in fp32, and weights to the bit."""
    for batch in batches:
        x = random(batch, packed.shape[1])
        expected = x.double() @ decoded(words, packed).double().T
        assert ((multiplied(words, packed, x) - expected).abs() <= 1e-6 * spqr_magnitude(words, packed, x)).all()
    found = spqr.decode(words.to(DEVICE), packed.to(DEVICE), backend="cuda_table")
    assert torch.equal(found.cpu(), decoded(words, packed))


def test_statistics_of_any_size_are_rounded_as_fp16_does():
    words, packed = spqr.pack(wild((16, 32), 3)), csr.no_outliers((16, 32))
    for backend in spqr.FOR_GPUS:
        found = spqr.decode(words.to(DEVICE), packed.to(DEVICE), backend=backend).cpu()
        assert torch.equal(found.nan_to_num(12345.0), decoded(words, packed).nan_to_num(12345.0))


def test_more_than_sixteen_vectors_and_one_alone_that_is_out():
    words, packed = matrix((20, 20))
    check(words, packed, 17)
    x = random(17, 20).to(DEVICE)
    expected = multiplied(words, packed, x)[0]
    assert torch.equal(multiplied(words, packed, x[0], x[0]), expected)


@pytest.mark.parametrize(("multiprocessors", "storage"), [(0, "csr"), (10_000, "ptcsr")])
def test_any_number_of_warps_to_a_tile_row(multiprocessors, storage, monkeypatch):
    """Two tile rows in a thread block, and two warps that share one."""
    monkeypatch.setattr(kernels, "multiprocessors", lambda device: multiprocessors)
    check(*matrix((17, 66), 0.2, storage), 2)


def test_columns_that_fill_shared_memory_more_than_once(storage, monkeypatch):
    for name, value in (("FLOATS_AT_ONCE", 64), ("TILES_DECODED", 2), ("WARPS", 1)):
        monkeypatch.setattr(kernels, name, value)
    for name in ("matvec_kernel", "decode_kernel"):
        monkeypatch.setattr(kernels, name, cache(getattr(kernels, name).__wrapped__))
    check(*matrix((3, 130), 0.3, storage), 1, 2)


def test_columns_told_by_32_bits(storage, monkeypatch):
    monkeypatch.setattr(layout, "NARROW_COLUMNS", 20)
    words, packed = matrix((3, 25), 0.2, storage)
    assert packed.col_vals.dtype == torch.int64
    check(words, packed, 1)


def test_outliers_alone_in_any_column(storage):
    for columns, far in ((65_536, [32_767, 32_768, 65_535]), (70_000, [3, 65_536, 69_999])):
        values = torch.tensor([1.5, -2, 2**-24, 7]).half()
        packed = csr.encode(storage, (3, columns), torch.tensor([0, 0, 2, 1]), torch.tensor([5, *far]), values)
        x = random(3, columns)
        expected = csr.add_matvec(packed, x, torch.ones(3, 3), "portable")
        found = csr.add_matvec(packed.to(DEVICE), x.to(DEVICE), torch.ones(3, 3, device=DEVICE), "cuda")
        assert torch.allclose(found.cpu(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("form", "reordered"), [(SpQRMatrix, True), (SpQRTransposed, False)])
def test_a_packed_matrix_is_decoded_and_multiplied_where_it_is(form, reordered, monkeypatch):
    words, others = matrix((18, 40), storage="csr" if form is SpQRMatrix else "ptcsr")
    order = torch.randperm(40, generator=torch.Generator().manual_seed(1)).int() if reordered else None
    packed = form((18, 40), torch.float16, words, others.offsets, others.col_vals, order)
    dense = decoded(packed.words, packed.outliers)
    dense = dense if order is None else dense[:, order.argsort()]
    there = form.of_parts(packed.shape, packed.dtype, {name: part.to(DEVICE) for name, part in packed.tensors.items()})
    if SIMULATED:  # where no tensor is on a GPU
        monkeypatch.setattr(spqr.BACKENDS, "choose", lambda *_: "cuda_table")
    out = torch.empty(18, 40, dtype=torch.float16, device=DEVICE)
    assert torch.equal(there.unpack_into(out).cpu(), dense.half())
    x = random(1, 40)[0]
    allowed = 1e-5 * dense.double().abs() @ x.double().abs() + 1e-7
    assert ((there.matvec(x.to(DEVICE)).cpu() - dense.double() @ x.double()).abs() <= allowed).all()

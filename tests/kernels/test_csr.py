"""Outliers as CSR and PTCSR against the oracle: to the bit when packed, and multiplied by every backend."""

import dataclasses
import itertools

import pytest
import torch

from tests import naive_spqr as naive
from tests.kernels.families import each_with_one, entries, outliers
from toolkit.kernels import csr

SHAPES = [(0, 0), (0, 16), (3, 0), (1, 1), (16, 16), (17, 40), (15, 100), (40, 33), (33, 70_000)]
SHARES = [0, 0.05, 0.5, 1]


on_backends = pytest.mark.parametrize(("backend", "storage"), each_with_one(csr.BACKENDS.available(), csr.STORAGES))


@pytest.mark.parametrize(("name", "oracle"), [("csr", naive.csr), ("ptcsr", naive.ptcsr)])
def test_packed_as_the_oracle_packs(name, oracle):
    for shape, share in itertools.product(SHAPES, SHARES):
        rows, columns, values = entries(shape, share)
        mixed = torch.randperm(len(rows), generator=torch.Generator().manual_seed(1))
        found = csr.encode(name, shape, rows[mixed], columns[mixed], values[mixed])
        found.check()
        if shape[1] <= 1 << 16:
            listed = list(zip(rows.tolist(), columns.tolist(), values.tolist(), strict=True))
            assert (found.offsets.tolist(), found.col_vals.tolist()) == oracle(listed, shape[0])
        for back, given in zip(found.entries(), (rows, columns, values), strict=True):
            assert torch.equal(back, given)


def test_worked_example():
    """Rows 0 and 2 of a block hold outliers; 1.0 is 0x3C00 and −2.0 is 0xC000 in fp16."""
    given = torch.tensor([0, 0, 2]), torch.tensor([1, 5, 3]), torch.tensor([1.0, -2.0, 1.0]).half()
    rows = csr.encode("csr", (3, 8), *given)
    assert rows.offsets.tolist() == [0, 2, 2, 3]
    assert [word & 0xFFFFFFFF for word in rows.col_vals.tolist()] == [0x3C000001, 0xC0000005, 0x3C000003]
    block = csr.encode("ptcsr", (3, 8), *given)
    assert block.offsets.tolist() == [0, 32]
    words = [word & 0xFFFFFFFF for word in block.col_vals.tolist()]
    assert words == [0x3C000001, 0, 0x3C000003, *[0] * 13, 0xC0000005, *[0] * 15]
    out = torch.zeros(3)
    csr.add_matvec(block, torch.arange(8).float(), out)
    assert out.tolist() == [1 - 10, 0, 3]


@on_backends
@pytest.mark.parametrize("columns", [65_536, 65_537])
def test_the_column_field_widens_when_the_columns_ask_for_it(storage, backend, columns):
    last = torch.tensor([columns - 1]), torch.tensor([1.5]).half()
    found = csr.encode(storage, (1, columns), torch.tensor([0]), *last)
    found.check()
    assert found.col_vals.dtype == (torch.int32 if columns == 65_536 else torch.int64)
    assert [part.tolist() for part in found.entries()] == [[0], [columns - 1], [1.5]]
    x = torch.zeros(columns)
    x[-1] = 2
    assert csr.add_matvec(found, x, torch.ones(1), backend).tolist() == [4]


@on_backends
def test_products_add_to_what_is_there(storage, backend):
    packed, x = outliers((17, 40), 0.5, storage), torch.randn(3, 40)
    out, alone = torch.full((3, 17), 2.0), csr.add_matvec(packed, x, torch.zeros(3, 17), backend)
    assert csr.add_matvec(packed, x, out, backend) is out
    torch.testing.assert_close(out, 2 + alone)


@pytest.mark.parametrize("storage", csr.STORAGES)
def test_words_that_cannot_be_are_refused(storage):
    given = torch.tensor([0, 0, 17]), torch.tensor([1, 5, 3]), torch.tensor([1.0, -2.0, 1.0]).half()
    packed = csr.encode(storage, (20, 8), *given)
    first, second = (lambda part, value, at=at: part.index_fill(0, torch.tensor([at]), value) for at in (0, 1))
    for name, wrong, told in (
        ("offsets", second(packed.offsets, 10**6), "offsets fall"),
        ("offsets", second(packed.offsets, -(2**31)), "offsets fall"),
        ("offsets", packed.offsets[:-1].clone(), r"offsets is torch\.int32"),
        ("col_vals", first(packed.col_vals, 0x3C000008), "outside of the matrix"),
        ("col_vals", first(packed.col_vals, 0x7C000001), "not finite"),
        ("col_vals", first(packed.col_vals, 0x3C000007), "columns do not rise"),
        ("col_vals", packed.col_vals[:-1].clone(), "offsets do not run from 0"),
        ("col_vals", packed.col_vals.long(), r"col_vals is torch\.int64"),
    ):
        with pytest.raises(ValueError, match=told):
            dataclasses.replace(packed, **{name: wrong}).check()
    wide = csr.encode(storage, (20, 70_000), *given)
    wide.col_vals[0] |= 1 << 48
    with pytest.raises(ValueError, match="bits set above its value"):
        wide.check()


def test_padding_of_ptcsr_is_checked():
    packed = csr.encode("ptcsr", (3, 8), torch.tensor([0, 0]), torch.tensor([1, 5]), torch.ones(2).half())
    for at, told in ((1, "padding"), (16 + 5, "outside of the matrix")):
        words = packed.col_vals.clone()
        words[16 + at % 16] = 0x3C000002
        with pytest.raises(ValueError, match=told):
            dataclasses.replace(packed, col_vals=words).check()
    with pytest.raises(ValueError, match="padding"):
        dataclasses.replace(
            packed, offsets=torch.tensor([0, 31], dtype=torch.int32), col_vals=packed.col_vals[:31]
        ).check()

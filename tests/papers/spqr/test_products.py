import pytest
import torch

from toolkit import paths
from toolkit.kernels import spqr
from toolkit.measure import turns
from toolkit.models import shapes
from toolkit.papers.spqr import products
from toolkit.papers.spqr.products import (
    FEW,
    MANY,
    READ,
    MatrixTwin,
    TimedProduct,
    product_measurements,
    timed,
)


@pytest.fixture(autouse=True)
def toy(tmp_path, monkeypatch):
    monkeypatch.setattr(paths, "cache_dir", lambda: tmp_path)
    monkeypatch.setattr(turns, "describe", lambda: {"cpu": "toy"})
    monkeypatch.setitem(shapes.SHAPES, "toy", {"q_proj": (48, 64), "down_proj": (32, 80)})
    monkeypatch.setattr(products, "SWEPT_BYTES", 1 << 16)


# the others are slow to compile
@pytest.mark.parametrize("name", ["dense", "dense, ours", "int8", "endor", "spqr, csr", "spqr, ptcsr"])
def test_a_contestant_multiplies(name):
    x, twin = torch.linspace(-1, 1, 64), MatrixTwin((48, 64), 0.1)
    nbytes, run = timed(name, twin, x)
    assert run().shape == (48,)
    assert 0 < nbytes <= 2 * 48 * 64
    if name.startswith("spqr"):  # both storages hold the same matrix
        expected = spqr.decode(products.random_words(twin.shape), products.random_outliers(twin, "csr")) @ x
        assert torch.allclose(run(), expected, rtol=1e-3, atol=1e-2)


def test_every_turn_has_a_read_and_each_product_and_is_kept(monkeypatch):
    table = product_measurements("toy", ["q_proj", "down_proj"], ["dense", "spqr, csr"], repetitions=2)
    assert (table["seconds"] > 0).all()
    counts = table.groupby(["op", "repetition", "contestant"]).size().unstack()
    assert counts.index.tolist() == [("down_proj", 1), ("down_proj", 2), ("q_proj", 1), ("q_proj", 2)]
    assert (counts[["dense", "spqr, csr", FEW, MANY, READ]] == 1).all(axis=None)
    assert table["measured_at"].notna().all()
    dense = table[table["contestant"].eq("dense") & table["op"].eq("q_proj")]
    assert dense["nbytes"].unique().tolist() == [2 * 48 * 64]
    monkeypatch.setattr(products, "take_turns", lambda *runs, **named: pytest.fail("measured again"))
    again = product_measurements("toy", ["q_proj", "down_proj"], ["dense", "spqr, csr"], repetitions=2)
    assert again["seconds"].tolist() == table["seconds"].tolist()


def test_small_products_run_on_one_core(monkeypatch):
    threads, really = {}, TimedProduct.token

    def token(self, number):
        threads[self.name] = torch.get_num_threads()
        return really(self, number)

    monkeypatch.setattr(TimedProduct, "token", token)
    product_measurements("toy", ["q_proj"], ["dense"], repetitions=1)
    assert threads == {READ: torch.get_num_threads(), "dense": torch.get_num_threads(), FEW: 1, MANY: 1}

"""What the two ways of changing neurons rewrite, counted; and reads of scattered neurons of a toy."""

import pytest

from tests.notebook_code import functions_of
from toolkit import paths
from toolkit.models import shapes

TOY = {"q_proj": (8, 2048), "fc1": (512, 2048), "fc2": (2048, 512)}


@pytest.fixture(autouse=True)
def toy(tmp_path, monkeypatch):
    monkeypatch.setattr(paths, "cache_dir", lambda: tmp_path)
    monkeypatch.setitem(shapes.SHAPES, "toy", TOY)


def test_swapping_moves_at_most_the_rows_that_go_and_reallocation_all_that_stay():
    notebook = functions_of("flash/fig06")
    needed, neurons = notebook.neurons_needed("toy", 0.1, 0.024, 3 + 5, 0)
    table = notebook.rewritten(needed, neurons, 2 * 2048, (1, 3), 5)
    assert len(table) == 2 * 2 * 5
    ways = {way: rows.reset_index() for way, rows in table.groupby("way")}
    swapped, rebuilt = ways["swap and append"], ways["reallocation"]
    assert (swapped["rewritten"] <= swapped["changed"]).all()
    assert (rebuilt["rewritten"] <= rebuilt["held"]).all()
    assert swapped["changed"].equals(rebuilt["changed"])
    wide, narrow = (rebuilt.query(f"window == {window}")["rewritten"].mean() for window in (3, 1))
    assert wide > narrow

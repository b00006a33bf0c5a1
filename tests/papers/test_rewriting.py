"""What the two ways of changing neurons rewrite, counted; and reads of scattered neurons of a toy."""

import pytest

from tests.notebook_code import functions_of
from toolkit import paths
from toolkit.measure import fio
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


@pytest.mark.parametrize("found", [True, False])
def test_reads_beside_fio_where_it_is_installed(monkeypatch, found):
    asked = []
    monkeypatch.setattr(fio, "installed", lambda: found)
    monkeypatch.setattr(fio, "read_gb_s", lambda file, mode, words: asked.append(words) or 2.0)
    table = functions_of("flash/fig05").scattered_reads("toy", 2, 0.05, 2, 0.001, 2, 0)
    ours = table[table["tool"] != "fio"]
    assert ours["tool"].value_counts().to_dict() == {"toolkit": 4, "toolkit, long bursts": 4}
    assert ours[["layout", "chunk_bytes"]].drop_duplicates().values.tolist() == [["bundled", 8192], ["split", 4096]]
    assert (ours["gb_s"] > 0).all()
    assert len(table) == (12 if found else 8)
    assert {(words["bs"], words["runtime"]) for words in asked} == ({(8192, "1ms"), (4096, "1ms")} if found else set())
    assert found == table["gb_s"].isin([2.0]).any()

"""The functions of FLASH's notebooks on traces and spans, by hand-worked cases."""

import numpy as np
import pytest
import torch

from tests.notebook_code import functions_of
from toolkit import paths
from toolkit.models import shapes
from toolkit.sparsity.trace import Trace, pack
from toolkit.timeline import Span, Timeline


def of(active):
    """A trace of one layer: [sequences][tokens][neurons] of 0 and 1."""
    bits = torch.tensor(active, dtype=torch.bool)
    ids = torch.zeros(bits.shape[:2], dtype=torch.int32)
    return Trace("tiny", "by hand", ids, (bits.shape[2],), (pack(bits),))


def test_friends_are_read_again_and_again():
    """Neuron 0 is the friend of all. Token 1 lacks 1 and 2; token 2 lacks 0, which came with both and was not kept."""
    active = np.array([[[0, 1, 1], [1, 1, 0]]], dtype=bool)
    friend = np.array([1, 0, 0])
    # three neurons are lacking: 1, 2, then 0; each brings two
    assert functions_of("flash/fig12").friend_reads(active, friend, window=5) == (2.0, 2.0)


def test_the_table_of_friends_counts_shared_tokens():
    trace = of([[[1, 1, 0, 1], [1, 1, 0, 0], [1, 0, 1, 0], [0, 0, 1, 1]]])
    table = functions_of("flash/fig12").friends_table(trace, 0, [1], window=2)
    told = table[table["row"] == "quantity"].set_index("quantity")["value"]
    # 0 shares 2 of 3 tokens with 1; 1 both with 0; 2 and 3 half of theirs with another
    assert told["friend 1"] == pytest.approx(100 * (2 / 3 + 1 + 1 / 2 + 1 / 2) / 4)
    assert told["read over needed"] == 2


def test_usage_is_measured_beside_the_law():
    trace = of([[[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 0], [0, 0, 0, 0]]])
    table = functions_of("flash/fig04").usage_table(trace, 5)
    measured = table[table["model"] == "tiny"].set_index("tokens")
    assert measured.loc[1, "used"] == pytest.approx(4 / 20)
    assert measured.loc[3, "used_percent"] == pytest.approx(100 * (3 + 3 + 1) / 12)
    law = table[table["model"] == "opt-6.7b, drawn"].set_index("tokens")
    assert law.loc[1, "used"] == pytest.approx(0.10, rel=1e-3)
    assert law.loc[5, "new"] == pytest.approx(0.024, rel=2e-3)
    assert (table.groupby("model")["evidence"].nunique() == 1).all()


def test_token_times():
    """Token 0 lasts from 1 to 3 s: bookkeeping from 1 to 2 s, but for a read of 0.75 s; then the predictor."""
    spans = [
        Span("read", "neurons", "storage", 0.25, 0.5, 8_000_000, 0),  # of the prompt
        Span("manage", "neurons", "dram", 1.0, 1.125, 0, 0),
        Span("read", "neurons", "storage", 1.125, 1.875, 3_000_000, 0),
        Span("manage", "neurons", "dram", 1.875, 2.0, 0, 0),
        Span("compute", "predictor", "dram", 2.0, 2.25, 0, 0),
        Span("compute", "ffn", "dram", 2.25, 3.0, 0, 0),
        Span("compute", "ffn", "dram", 3.5, 3.75, 0, 0),
    ]
    timeline = Timeline(tuple(spans), "measured")
    found = functions_of("flash/fig08").token_times(timeline, [1.0, 3.0, 4.0]).set_index("token")
    assert found.loc[0].to_dict() == {
        "io_ms": 750, "memory_ms": 250, "predictor_ms": 250, "compute_ms": 1000, "total_ms": 2000, "mb": 3,
    }  # fmt: skip
    assert found.loc[1, ["io_ms", "compute_ms", "total_ms"]].tolist() == [0, 1000, 1000]


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


def test_drafted_tokens_load_what_memory_lacks(monkeypatch):
    """Each token needs a neuron of its own, and neuron 0. If all drafts are right, nine tokens load nine."""
    book = functions_of("flash/fig04")
    monkeypatch.setitem(book.drafted_loads.__globals__, "draft_tokens", 2)
    monkeypatch.setitem(book.drafted_loads.__globals__, "window", 2)
    active = np.eye(9, dtype=bool)
    active[:, 0] = True
    loads, accepted = book.drafted_loads(active, acceptance=1)
    assert accepted == 1
    assert loads == pytest.approx(1 / 9)
    none, accepted = book.drafted_loads(active, acceptance=0, end=1)
    assert accepted == 0
    assert none > loads  # each pass gives one token, and loads two wrong ones beside it

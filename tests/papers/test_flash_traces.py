"""What FLASH's notebooks make of traces, by hand-worked cases."""

import numpy as np
import pytest
import torch

from tests.notebook_code import functions_of
from toolkit.sparsity.trace import Trace, pack


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

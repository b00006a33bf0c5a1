"""Which ways race in `beyond/planner`, and how winners are counted, without a race."""

import pandas as pd
import pytest

from tests.notebook_code import functions_of


def test_a_winner_a_tie_and_a_miss_by_hand():
    rows = [
        ("one", 1.0, "a", 9.0, 10.0, 9.5, 10.5),
        ("one", 1.0, "b", 8.0, 5.0, 4.0, 6.0),
        ("two", 1.0, "a", 9.0, 8.0, 7.0, 9.2),  # named; its best turn is as fast as the other's worst
        ("two", 1.0, "b", 8.0, 10.0, 9.0, 11.0),
        ("two", 2.0, "a", 8.0, 10.0, 9.0, 11.0),
        ("two", 2.0, "b", 9.0, 5.0, 4.0, 6.0),
        ("three", 1.0, "a", 9.0, 10.0, 9.5, 10.5),  # nothing to choose from
    ]
    columns = ["model", "dram_mb", "way", "predicted_per_s", "tokens_per_s"]
    columns += ["tokens_per_s_low", "tokens_per_s_high"]
    found = functions_of("beyond/planner").winners(pd.DataFrame(rows, columns=columns))
    assert found["named"].tolist() == ["a", "a", "b"]
    assert found["fastest"].tolist() == ["a", "b", "a"]
    assert found["tie"].tolist() == [True, True, False]
    assert found["reached"].tolist() == pytest.approx([1.0, 0.8, 0.5])

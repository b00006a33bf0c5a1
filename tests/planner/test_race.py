"""Which ways race in `beyond/planner`, and how winners are counted, without a race."""

import pandas as pd
import pytest

from tests.notebook_code import functions_of
from toolkit.errors import UserError


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


def test_each_model_races_the_named_ways_that_it_has():
    names = ("dense", "neurons, 80 % zeros", "neurons, 90 % zeros", "experts, 4 bits", "llama.cpp Q4_0")
    ways_of = functions_of("beyond/planner").ways_of

    def racing(model, layers=None):
        return [way.name for way in ways_of(model, layers, names)]

    assert racing("smollm2-135m") == ["dense", "neurons, 80 % zeros", "neurons, 90 % zeros", "llama.cpp Q4_0"]
    assert racing("smollm2-135m-sparse90") == ["neurons, 90 % zeros"]
    assert racing("smollm2-135m-moe-upcycled") == ["experts, 4 bits"]
    assert racing("llama2-7b", 3) == ["dense", "llama.cpp Q4_0"]
    with pytest.raises(UserError, match=r"unknown way 'dens'.*did you mean 'dense'"):
        ways_of("llama2-7b", 3, ("dens",))

"""The sentence of `endor/tab_perplexity`, on tables made by hand."""

import pandas as pd
import pytest

from toolkit.papers import beyond


def rows(form, method, pattern, bits, perplexity, accuracy=0.5):
    labels = {"form": form, "method": method, "pattern": pattern, "zeros": 0.5, "bits_per_weight": bits}
    labels |= {"ratio": bits / 16, "entropy_bits": 9.0 if "endor" in form else None}
    return [
        labels | {"metric": "perplexity", "value": perplexity},
        labels | {"metric": "one", "value": accuracy, "standard_error": 0.03, "chance": 0.25},
        labels | {"metric": "two", "value": accuracy + 0.2, "standard_error": 0.04, "chance": 0.5},
    ]


@pytest.fixture
def table():
    found = rows("fp16", "dense", "none", 16.0, 10.0) + rows("int8", "dense", "none", 8.0, 10.5)
    found += rows("fp16, endor", "wanda", "50 %", 9.2, 20.0) + rows("fp16, endor", "wanda", "80 %", 4.2, 90.0)
    return pd.DataFrame(found + rows("fp16, 2:4", "wanda", "2:4", 9.0, 40.0))


def test_the_sentence_of_pruning(table):
    differences = pd.DataFrame(
        {"method": ["wanda − sparsegpt"] * 2, "value": [0.03, -0.01], "standard_error": [0.01, 0.01]}
    )
    said = beyond.pruning_sentence(table, differences)
    assert "not pruned, dense 10.0 (16.0 bits), dense 10.5 (8.0 bits)" in said
    assert "-0.010 to +0.030 (draws of calibration text: 2, of which beyond two standard errors: 1)" in said

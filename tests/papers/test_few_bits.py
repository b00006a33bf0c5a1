"""What `spqr/tab_perplexity` shows, on tables made by hand."""

import math

import matplotlib.pyplot as plt
import pandas as pd
import pytest

from toolkit.papers import few_bits
from toolkit.studies.variants import ModelVariant

PERPLEXITIES = {
    "fp16": (16.0, 20.0),
    "int3, spqr 1 %": (4.6, 22.0),
    "int3, gptq 16": (5.0, 25.0),
    "int3, gptq": (3.5, 30.0),
    "Q3_K_S, llama.cpp": (4.3, 24.0),
}


@pytest.fixture
def tables():
    rows, nll = [], []
    for form, (bits, perplexity) in PERPLEXITIES.items():
        labels = {"form": form, "method": "dense", "pattern": "none", "zeros": 0.0, "bits_per_weight": bits}
        labels |= {"ratio": bits / 16, "entropy_bits": None}
        rows.append(labels | {"metric": "perplexity", "value": perplexity, "chance": None, "standard_error": 1.0})
        variant = vars(ModelVariant()) | {"form": form, "calibration_windows": 8 if "gptq" in form else None}
        for window, off in enumerate((-0.5, 0.5)):  # windows differ, and models differ alike on each
            nll.append(variant | {"window": window, "nll": math.log(perplexity) + off})
    return pd.DataFrame(rows), pd.DataFrame(nll)


def test_one_row_a_form(tables):
    found = few_bits.by_form(*tables).set_index("form")
    assert found["quantiser"].tolist() == ["dense", "spqr", "gptq", "gptq", "llama.cpp"]
    assert found["over_dense"].tolist() == [1.0, 1.1, 1.25, 1.5, 1.2]
    assert found["on_front"].tolist() == [True, True, False, True, True]
    assert found["log_difference"].tolist() == pytest.approx([0, *map(math.log, (1.1, 1.25, 1.5, 1.2))])
    assert found["difference_error"].tolist() == pytest.approx([0] * 5)


def test_pairs_sentence_and_figure(tables):
    found = few_bits.by_form(*tables)
    pairs = few_bits.between(tables[1], "int3, spqr 1 %", ["int3, gptq"])
    assert pairs["value"].tolist() == pytest.approx([math.log(22 / 30)])
    said = few_bits.sentence(found)
    assert "int3, spqr 1 % 1.100 at 4.60 bits; int3, gptq 1.500 at 3.50 bits" in said
    assert said.endswith("within 1.15 × dense are 4.60 (int3, spqr 1 %).")
    figure, axes = plt.subplots()
    few_bits.draw(axes, found)
    assert len(axes.texts) == 4  # the front
    plt.close(figure)

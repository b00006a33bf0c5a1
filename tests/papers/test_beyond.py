"""What the notebooks beyond the papers say, on tables made by hand."""

import matplotlib.pyplot as plt
import pandas as pd
import pytest

from toolkit.papers import beyond
from toolkit.studies.variants import ModelVariant


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


def test_variants_of_bytes():
    found = beyond.byte_variants(["wanda"], [0.5, 0.7], ["int8"], windows=8, seed=1)
    assert found[:2] == [ModelVariant("fp16"), ModelVariant("int8")]
    assert ModelVariant("int8, endor", "wanda", 0.7, None, 8, 1) in found
    assert ModelVariant("fp16, 2:4", "wanda", 0.5, "2:4", 8, 1) in found
    assert len(found) == len(set(found)) == 2 + 2 * 3
    assert beyond.few_bits_variants(["int3, gptq"], 8, 1)[1] == ModelVariant(
        "int3, gptq", calibration_windows=8, seed=1
    )


def test_one_row_a_variant(table):
    summary = beyond.by_variant(table)
    assert summary["perplexity"].tolist() == [10.0, 10.5, 20.0, 90.0, 40.0]
    assert summary["on_front"].tolist() == [True, True, False, True, False]
    first = summary.iloc[0]
    assert first["accuracy"] == pytest.approx(0.6)
    assert first["chance"] == pytest.approx(0.375)
    assert first["accuracy_error"] == pytest.approx(0.05 / 2)
    assert "1 are beaten" in beyond.front_sentence(summary)
    assert "wanda 80 % fp16 (4.2 bits, 90.0)" in beyond.front_sentence(summary)


def test_figures_draw_every_variant(table):
    summary = beyond.by_variant(table)
    figure, axes = plt.subplots(1, 3)
    beyond.draw_quality(axes[0], summary, "perplexity")
    assert sum(len(line.get_xdata()) for line in axes[0].lines) == len(summary)
    beyond.draw_front(axes[1], summary)
    assert [text.get_text() for text in axes[1].texts] == ["wanda 80 % fp16", "int8", "fp16"]
    beyond.draw_bits(axes[2], summary)
    plt.close(figure)


def test_the_sentence_of_pruning(table):
    differences = pd.DataFrame(
        {"method": ["wanda − sparsegpt"] * 2, "value": [0.03, -0.01], "standard_error": [0.01, 0.01]}
    )
    said = beyond.pruning_sentence(table, differences)
    assert "not pruned, dense 10.0 (16.0 bits), dense 10.5 (8.0 bits)" in said
    assert "-0.010 to +0.030 (draws of calibration text: 2, of which beyond two standard errors: 1)" in said

"""Tables, figures and sentences of SpQR's twins, on times made by hand."""

import matplotlib.pyplot as plt
import pandas as pd
import pytest

from toolkit.measure.twin_forward import Twin
from toolkit.papers import spqr_twins

SECONDS = {("dram", "spqr"): [2, 4, 2], ("dram", "llama.cpp Q3_K"): [3, 3, 5], ("storage", "spqr"): [8, 8, 9]}


@pytest.fixture
def table():
    turns = pd.DataFrame(
        {"way": way, "place": place, "repetition": number, "seconds": float(seconds)}
        for (place, way), values in SECONDS.items()
        for number, seconds in enumerate(values, 1)
    ).assign(layer_bytes=50, weights=100, head_bytes=10, mode="memory")
    return spqr_twins.twin_passes(turns, Twin("toy", 5))


def test_a_table_by_hand(table):
    """Turn by turn llama.cpp takes 3 / 2, 3 / 4 and 5 / 2 times as long."""
    spqr, rival, streamed = table.to_dict("records")
    assert [spqr["minimum_s"], spqr["median_s"], spqr["maximum_s"]] == [2, 2, 4]
    assert [spqr["over_rival"], rival["over_rival"]] == [1.5, 1]
    assert pd.isna(streamed["over_rival"])
    assert spqr["bits_per_weight"] == 4
    assert spqr["gb_s"] == pytest.approx(60 / 2e9)
    assert set(table["evidence"]) == {"measured"}


def test_the_figure_and_the_sentence_show_each_place(table):
    figure = spqr_twins.twin_figure([table])
    assert [axes.get_title() for axes in figure.axes] == [
        "toy, 5 layers. All layers in memory",
        "toy, 5 layers. Every layer from the disk",
    ]
    plt.close(figure)
    assert spqr_twins.twin_sentence([table]) == (
        "toy, 5 layers, all layers in memory: SpQR, CSR takes 2000.0 ms a token at 4.00 bits a weight, 1.50 times as "
        "fast as llama.cpp Q3_K at 4.00 bits; toy, 5 layers, every layer from the disk: SpQR, CSR takes 8000.0 ms a "
        "token at 4.00 bits a weight."
    )

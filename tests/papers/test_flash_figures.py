"""FLASH beside what a user would take instead, from made-up times."""

import pandas as pd
from matplotlib import pyplot as plt

from toolkit.papers import flash_rivals


def test_rivals_beside_ours():
    ours = pd.DataFrame({"way": ["naive", "bundling"], "total_ms": [100.0, 10.0]})
    theirs = pd.DataFrame({"way": ["llama.cpp F16", "llama.cpp Q4_0"], "total_ms": [80.0, 8.0]})
    ends = {"total_ms_low": 1.0, "total_ms_high": 2.0, "model": "toy", "layers": 3}
    table = flash_rivals.beside_rivals(ours.assign(**ends), theirs.assign(**ends))
    assert table.set_index("way")["over_rival"].to_dict() == {
        "naive": 10, "bundling": 1, "llama.cpp F16": 8, "llama.cpp Q4_0": 0.8
    }  # fmt: skip
    words = flash_rivals.rival_words(table)
    assert "naive 10.0, llama.cpp F16 8.0, llama.cpp Q4_0 0.8. Quicker than fewer neurons: llama.cpp Q4_0." in words
    plt.close(flash_rivals.rival_figure(table))

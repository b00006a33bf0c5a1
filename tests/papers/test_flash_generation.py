"""Times of tokens from spans, by a hand-worked example."""

import pandas as pd
import pytest

from toolkit.papers.flash.generation import over_turns, token_times
from toolkit.timeline.spans import Span, Timeline


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
    found = token_times(Timeline(tuple(spans), "measured"), [1.0, 3.0, 4.0]).set_index("token")
    assert found.loc[0].to_dict() == {
        "io_ms": 750, "memory_ms": 250, "predictor_ms": 250, "compute_ms": 1000, "total_ms": 2000, "mb": 3,
    }  # fmt: skip
    assert found.loc[1, ["io_ms", "compute_ms", "total_ms"]].tolist() == [0, 1000, 1000]


def test_medians_and_ratios_over_turns():
    """Each turn is compared with the baseline of the same turn."""
    times = {"naive FFN": [8, 12, 30], "hybrid FFN": [4, 6, 6], "all": [1, 3, 2]}
    runs = [
        {"way": way, "repetition": turn, "total_ms": ms} for way, row in times.items() for turn, ms in enumerate(row)
    ]
    row = over_turns(pd.DataFrame(runs)).set_index("way").loc["all"]
    assert row[["total_ms", "total_ms_low", "total_ms_high"]].tolist() == [2, 1, 3]
    assert row[["speedup", "speedup_low", "speedup_high"]].tolist() == pytest.approx([8, 4, 15])
    assert row[["over_hybrid", "over_hybrid_low", "over_hybrid_high"]].tolist() == pytest.approx([3, 2, 4])

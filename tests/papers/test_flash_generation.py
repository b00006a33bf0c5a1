"""Times of tokens from spans, by a hand-worked example."""

from tests.notebook_code import functions_of
from toolkit.timeline import Span, Timeline


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

"""Times of tokens from spans, words that stay the same, and sentences, by hand-worked examples."""

from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch

from toolkit.papers import flash_generation as generation
from toolkit.papers import flash_generation_figures as shown
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
    found = generation.token_times(Timeline(tuple(spans), "measured"), [1.0, 3.0, 4.0]).set_index("token")
    assert found.loc[0].to_dict() == {
        "io_ms": 750, "memory_ms": 250, "predictor_ms": 250, "compute_ms": 1000, "total_ms": 2000, "mb": 3,
    }  # fmt: skip
    assert found.loc[1, ["io_ms", "compute_ms", "total_ms"]].tolist() == [0, 1000, 1000]


def test_the_papers_rows():
    rows = generation.published().set_index(["model", "machine", "way"])
    assert len(rows) == 21
    assert rows.loc[("OPT 6.7B", "GPU", "speculative"), "total_ms"] == 60
    assert rows.loc[("OPT 6.7B", "CPU", "all"), ["io_ms", "memory_ms", "compute_ms"]].tolist() == [105, 58, 506]


@pytest.mark.parametrize(("text", "count"), [("a b c", 3), ("a b x c", 2), ("x", 0), ("", 0), ("a b c d", 3), ("a", 1)])
def test_words_that_are_the_same(text, count):
    assert generation._same_words(text, "a b c") == count


def test_texts_are_set_beside_the_dense_one():
    """A model that finds every next token equally likely is as surprised by each text as it has tokens."""

    class Even(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.anywhere = torch.nn.Parameter(torch.zeros(()))

        def forward(self, tokens, use_cache):
            return SimpleNamespace(logits=torch.zeros(*tokens.shape, 8))

    class Words:
        def decode(self, tokens, skip_special_tokens):
            return " ".join(map(str, tokens.tolist()))

    made = {"dense": torch.tensor([7, 1, 2, 3]), "other": torch.tensor([7, 1, 2, 4, 3])}
    table = pd.DataFrame(generation._compared("seven", 1, made, Even(), Words()))
    assert table["text"].tolist() == ["1 2 3", "1 2 4 3"]
    assert table[["tokens", "same_words"]].to_numpy().tolist() == [[3, 3], [4, 2]]
    assert table["dense_perplexity"].tolist() == pytest.approx([8, 8])
    told = shown.texts_sentence(table)
    assert "(median): other: 2. " in told
    assert told.endswith("(median): dense: 8.0; other: 8.0.")


def test_growth_and_its_sentence():
    tokens = np.arange(40)
    table = pd.DataFrame({"sampling": "greedy", "token": tokens, "io_ms": np.where(tokens < 10, 9.0, 4.0), "mb": 2.0})
    assert shown.growth(table)["greedy"] == 1
    assert "does not grow" in shown.growth_sentence(table)
    table.loc[table["token"] >= 30, "io_ms"] = 6.0
    assert "grows: in the last quarter it is greedy 1.50 times (bytes 1.00)" in shown.growth_sentence(table)


def test_the_sentence_about_ways():
    rows = [
        {"way": "naive", "total_ms": 100.0, "speedup": 1.0},
        {"way": "all", "total_ms": 25.0, "speedup": 4.0},
        {"way": "speculative", "total_ms": 30.0, "speedup": 3.3, "acceptance": 0.5, "tokens_a_pass": 2.0},
    ]
    told = shown.end_to_end_sentence(pd.DataFrame(rows).assign(memory_share=0.75), 0.68)
    assert "naive 100 ms (1.0×), all 25 ms (4.0×)" in told
    assert "Guessing ahead does not pay: the neurons in memory guess 50% of the tokens rightly" in told
    assert told.endswith("need 68% of the model's bytes: half does not suffice.")

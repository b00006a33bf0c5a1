"""Tables and sentences of `beyond/sparse_curve` on numbers made up, and its ways on a toy model."""

import pandas as pd
import pytest
import torch
from matplotlib import pyplot as plt
from transformers import LlamaConfig, LlamaForCausalLM

from toolkit.activations.thresholds import run_decoder, watched
from toolkit.errors import UserError
from toolkit.models.ffn import decoder_ffns
from toolkit.models.loading import SPARSE as SPARSE_MODELS
from toolkit.papers import sparse_curve
from toolkit.studies.variants import EvaluationSettings

SPARSE = pd.DataFrame(
    {
        "family": ["dense", "threshold", "threshold"],
        "asked": [0.0, 0.7, 0.9],
        "zeros": [0.0, 0.71, 0.9],
        "perplexity": [20.0, 24.0, 60.0],
        "ffn_bytes": [160, 48, 16],
        "evidence": "measured",
    }
)
QUALITY = pd.DataFrame(
    {
        "form": ["fp16", "int8", "int4, hqq", "int4, hqq"],
        "metric": ["perplexity", "perplexity", "perplexity", "local_agreement"],
        "value": [20.0, 20.1, 23.0, 0.9],
        "bits_per_weight": [16.0, 8.0, 4.5, 4.5],
        "evidence": "measured",
    }
)


def test_rivals_are_better_at_no_more_bytes():
    few_bits = sparse_curve.few_bits_rows(QUALITY, weights=80)
    assert few_bits["ffn_bytes"].tolist() == [80, 45]
    table = sparse_curve.joined(SPARSE, few_bits)
    assert table["relative"].tolist() == pytest.approx([1, 1.2, 3, 1.005, 1.15])
    assert table["beaten_by"].tolist() == ["", "int4, hqq", "", "", ""]
    assert "(int4, hqq) has a lower perplexity than 1 of 2 models" in sparse_curve.sentence(table)
    assert "threshold 1.20 at 71%, 3.00 at 90%" in sparse_curve.sentence(table)
    found = sparse_curve.headline(table, "tiny")
    assert found["cost"].startswith("With 71% of the FFN outputs zero, tiny has a perplexity of")
    assert "1 of 2 models" in found["negative"]
    assert "negative" not in sparse_curve.headline(table.assign(beaten_by=""), "tiny")


def test_what_is_far_worse_stands_at_the_edge():
    worse = {"family": "FATReLU", "asked": 0.8, "zeros": 0.8, "perplexity": 5000.0, "ffn_bytes": 32}
    table = pd.concat([SPARSE, pd.DataFrame([worse])], ignore_index=True)
    _, axes = plt.subplots()
    sparse_curve.draw(axes, table, "zeros")
    assert axes.get_ylim()[1] < 100
    assert [text.get_text() for text in axes.texts] == ["5,000"]
    assert "FATReLU" in axes.get_legend_handles_labels()[1]


def toy():
    torch.manual_seed(0)
    sizes = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, initializer_range=0.2)).eval()


@pytest.mark.parametrize("way", sparse_curve.WAYS)
@torch.no_grad()
def test_each_way_gives_the_share_of_zeros(one_thread, way):
    model, windows = toy(), torch.randint(0, 61, (4, 16), generator=torch.Generator().manual_seed(0))
    counts = []
    see = lambda _, outputs: counts.append((outputs == 0).double().mean().item())  # noqa: E731
    with sparse_curve.WAYS[way](sparse_curve.Fitted(model, windows), 0.8), watched(model, see):
        for window in windows:
            run_decoder(model, window)
    assert sum(counts) / len(counts) == pytest.approx(0.8, abs=0.05)
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_bytes_of_a_model():
    model = toy()
    assert sparse_curve.ffn_weights(model) == 3 * 3 * 32 * 48
    assert sparse_curve.bundle_bytes(decoder_ffns(model)[0]) == 4096


def test_recovered_versions_by_family():
    found = sparse_curve.recovered("smollm2-135m")
    assert {name for _, _, name in found} == set(SPARSE_MODELS)
    for family, share, name in found:
        assert name.endswith(f"sparse{share * 100:.0f}")
        assert ("relu" in name) == (family == sparse_curve.RECOVERED_RELU)
    assert sparse_curve.recovered("no such model") == []


def test_an_unknown_way_is_refused(monkeypatch):
    monkeypatch.setattr(sparse_curve, "dense_model", lambda _: (toy(), None, None))
    monkeypatch.setattr(sparse_curve, "_row", lambda *_, **__: {})
    with pytest.raises(UserError, match="unknown way to get zeros 'magic'"):
        sparse_curve.sparse_rows(EvaluationSettings("tiny"), ["magic"], [0.8])

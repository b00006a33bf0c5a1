"""Ways to get zeros, on a toy model."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from toolkit.activations.thresholds import run_decoder, watched
from toolkit.errors import UserError
from toolkit.models.ffn import decoder_ffns
from toolkit.models.loading import SPARSE as SPARSE_MODELS
from toolkit.studies import sparse_curve
from toolkit.studies.variants import EvaluationSettings


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

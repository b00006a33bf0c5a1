"""Ways to get zeros, on a toy model."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.notebook_code import functions_of
from toolkit.papers.beyond import sparse_curve
from toolkit.sparsity.thresholds import run_decoder, watched
from toolkit.studies.quality import EvaluationSettings


def toy():
    torch.manual_seed(0)
    sizes = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, initializer_range=0.2)).eval()


@pytest.mark.parametrize("way", sparse_curve.ZEROS_BY)
@torch.no_grad()
def test_each_way_gives_the_share_of_zeros(one_thread, way):
    model, windows = toy(), torch.randint(0, 61, (4, 16), generator=torch.Generator().manual_seed(0))
    counts = []
    see = lambda _, outputs: counts.append((outputs == 0).double().mean().item())  # noqa: E731
    with sparse_curve.ZEROS_BY[way](sparse_curve.Fitted(model, windows), 0.8), watched(model, see):
        for window in windows:
            run_decoder(model, window)
    assert sum(counts) / len(counts) == pytest.approx(0.8, abs=0.05)
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_zeros_are_counted_and_the_model_is_restored(one_thread, monkeypatch):
    model = toy()
    monkeypatch.setattr(sparse_curve, "loaded", lambda name: (model, None, "checksum"))
    monkeypatch.setattr(sparse_curve, "tokens_of", lambda *_: torch.arange(3000) * 7 % 61)
    tokens = torch.arange(16)[None]
    plain, facts = model(tokens).logits, {}
    for alteration in (sparse_curve.Zeros(), sparse_curve.Zeros("threshold", 0.8)):
        with alteration.change(EvaluationSettings("tiny")) as facts[alteration]:
            model(tokens)
        assert torch.equal(model(tokens).logits, plain)
    assert [round(each["zeros"], 1) for each in facts.values()] == [0, 0.8]


def test_blocks_of_neurons_that_fire_are_counted_once():
    blocks_bytes = functions_of("beyond/sparse_curve").blocks_bytes
    random = torch.Generator().manual_seed(0)
    for share in (0.1, 0.5, 1.0):
        sizes = torch.randint(100, 9000, (50,), generator=random)
        fired = torch.rand(50, generator=random) < share
        touched, start = set(), 0
        for size, fires in zip(sizes.tolist(), fired.tolist(), strict=True):
            touched |= {place // 4096 for place in (start, *range(start, start + size, 100), start + size - 1) if fires}
            start += size
        assert blocks_bytes(sizes, fired) == 4096 * len(touched)
    assert blocks_bytes(sizes, torch.zeros(50, dtype=torch.bool)) == 0

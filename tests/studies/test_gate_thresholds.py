"""Neurons cut by |act(gate)|, against the hooks of `toolkit.sparsity` and by hand."""

import pytest
import torch

from tests.models.test_models import LLAMA, small
from tests.notebook_code import functions_of
from toolkit.models.activation import replaced
from toolkit.models.experts import decoder_experts
from toolkit.models.plain import plain
from toolkit.sparsity.thresholds import thresholded, watched

fig02, fig10 = functions_of("corm/fig02"), functions_of("corm/fig10")
TOKENS = torch.arange(24).view(1, -1) % 64


def test_counts_and_cuts_by_hand(monkeypatch):
    monkeypatch.setitem(fig02.CountedActivation.forward.__globals__, "thetas", [1.0, 0.0, 2.0])
    counted, cut = fig02.CountedActivation("relu"), fig10.CutActivation("relu", 1.0)
    x = torch.tensor([-1.0, 0.5, 1.0, 1.5, 4.0])
    assert counted(x).tolist() == [0, 0.5, 1, 1.5, 4]
    assert (counted.counts.tolist(), counted.total) == ([1, 3, 4], 5)
    assert cut(x).tolist() == [0, 0, 0, 1.5, 4]
    assert (cut.ignored, cut.total) == (3, 5)


@torch.no_grad()
def test_a_dense_model_is_cut_as_by_the_gate_criterion():
    model = small("Llama", **LLAMA | {"initializer_range": 0.3}).eval()
    cuts = [fig10.CutActivation("silu", 0.1) for _ in range(2)]
    with replaced(model, cuts):
        found = model(TOKENS).logits
    shares = []
    with (
        thresholded(model, torch.tensor([0.1, 0.1]), "gate"),
        watched(model, lambda _, sizes: shares.append((sizes.abs() <= 0.1).double().mean().item()), "gate"),
    ):
        expected = model(TOKENS).logits
    torch.testing.assert_close(found, expected)
    assert [cut.ignored / cut.total for cut in cuts] == pytest.approx(shares, abs=1e-3)


@torch.no_grad()
def test_of_a_mixture_only_the_experts_used_count():
    model = plain(small("Mixtral", **LLAMA | {"num_local_experts": 4, "num_experts_per_tok": 2})).eval()
    cuts = [fig02.CountedActivation("silu") for _ in range(2)]
    expected = model(TOKENS).logits
    with replaced(model, cuts):
        torch.testing.assert_close(model(TOKENS).logits, expected)
    assert [cut.total for cut in cuts] == [24 * 2 * 48] * 2
    assert decoder_experts(model)[0].per_token == 2

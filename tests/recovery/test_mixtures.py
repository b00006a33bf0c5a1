"""A mixture upcycled from a toy model."""

import json

import pandas as pd
import pytest
import torch

from toolkit.models.ffn import decoder_ffns
from toolkit.models.upcycled import FILE, as_mixtral, mixtral_from
from toolkit.quality import perplexity
from toolkit.recovery import upcycling
from toolkit.recovery.training import Training
from toolkit.recovery.upcycling import Upcycling, starting_routers, upcycle

TRAINING = Training(steps=30, batch=2, sequence_length=16, learning_rate=0.01, warm_up=2, keep_every=7)
UPCYCLE = Upcycling("tiny", experts=4, per_token=2, rank=2, corpora=("a", "b"), training=TRAINING)


@pytest.fixture
def base(tiny):
    return tiny("llama").requires_grad_(False)


def test_an_upcycled_model_starts_as_the_dense_one_and_learns(base, tokens):
    texts = [tokens, tokens.flip(0)]
    parts, curve = upcycle(UPCYCLE, base, texts)
    with torch.no_grad():
        windows = torch.cat([TRAINING.windows(text, 0) for text in texts])
        expected = base(windows, labels=windows).loss.item()
    assert curve[0]["loss"] == pytest.approx(expected, rel=1e-4)
    assert curve[-1]["loss"] < 0.9 * curve[0]["loss"]
    again, same = upcycle(UPCYCLE, base, texts)
    assert same == curve
    assert torch.equal(again["router"], parts["router"])


@torch.no_grad()
def test_the_mixture_that_trains_is_the_mixtral(base, tokens):
    routers = starting_routers(base, UPCYCLE, [tokens, tokens.flip(0)])
    parts = upcycling.fresh(decoder_ffns(base), UPCYCLE, routers)
    for name in ("gate_up_left", "down_left"):
        parts[name].normal_(std=0.1)
    mixtral, dense = as_mixtral(base, parts, 2, torch.float32), base(tokens[None, :16]).logits
    with upcycling.mixed(base, parts, 2) as balances:
        found = base(tokens[None, :16]).logits
        assert len(balances) == 3
        assert all(balance > 0 for balance in balances)
    assert torch.equal(base(tokens[None, :16]).logits, dense)
    torch.testing.assert_close(found, mixtral(tokens[None, :16]).logits, rtol=1e-4, atol=1e-4)


def test_balance_by_hand():
    even = torch.full((4, 2), 0.5)
    assert upcycling.balance(even, torch.tensor([[0], [1], [0], [1]])).item() == 1
    uneven = torch.tensor([[0.75, 0.25]]).expand(4, 2)
    assert upcycling.balance(uneven, torch.zeros(4, 1, dtype=torch.int64)).item() == pytest.approx(1.5)


def test_routing_is_summed_up_by_hand():
    """Two layers, two experts: one text uses all evenly, the other one expert alone."""
    loads = {"a": [0.5, 0.5], "b": [1.0, 0.0]}
    rows = [
        (text, layer, at, load, 1.0) for text, of in loads.items() for layer in (0, 1) for at, load in enumerate(of)
    ]
    found = pd.DataFrame(rows, columns=["text", "layer", "expert", "load", "token_entropy"])
    summary = upcycling.routing_summary(found)
    assert summary.to_dict("list") == {
        "text": ["a", "b"], "load_entropy": [1, 0], "largest_load": [0.5, 1], "token_entropy": [1, 1],
        "shared_load": [1, 0.5],
    }  # fmt: skip


def test_the_folder_of_a_mixture_loads(base, tiny, tokens, tmp_path, monkeypatch):
    monkeypatch.setattr(upcycling, "SEQUENCE_LENGTH", 16)
    upcycling.make(UPCYCLE, tmp_path, base, [tokens, tokens, tokens.flip(0), tokens.flip(0)], 2)
    dense, folder = tiny("llama").requires_grad_(False), tmp_path / "tiny-moe-upcycled"
    mixtral, quality = mixtral_from(dense, folder / FILE, torch.float32), pd.read_csv(folder / "quality.csv")
    assert quality["model"].tolist() == ["dense", "dense", "upcycled", "upcycled"]
    assert perplexity(mixtral, tokens, 16, 2) == pytest.approx(quality["perplexity"][2], rel=0.02)
    loads = pd.read_csv(folder / "routing.csv")
    assert loads.groupby(["text", "layer"])["load"].sum().tolist() == pytest.approx([1] * 6, abs=1e-5)
    assert json.dumps({"experts": 4, "per_token": 2, "rank": 2})[1:-1] in (folder / "README.md").read_text()

"""Mixtures trained on toy models: split and upcycled ones."""

import json

import pandas as pd
import pytest
import torch
from torch.nn import functional

from toolkit.models.experts import decoder_experts
from toolkit.models.ffn import decoder_ffns
from toolkit.models.mixture import FILE, split_from
from toolkit.models.mixture import split as split_model
from toolkit.models.upcycled import FILE as EXPERTS
from toolkit.models.upcycled import as_mixtral, mixtral_from
from toolkit.quality import perplexity
from toolkit.recovery import split, upcycling
from toolkit.recovery.split import Sizes, Splitting, balanced_clusters, ffn_inputs, magnitudes, split_parts, usage
from toolkit.recovery.training import Training
from toolkit.recovery.upcycling import Upcycling, starting_routers, upcycle
from toolkit.sparsity.calibration import Calibration

TRAINING = Training(steps=30, batch=2, sequence_length=16, learning_rate=0.01, warm_up=2, keep_every=7)
SPLIT = Splitting("tiny", Sizes(experts=4, per_token=2, shared=4), rank=2, down_rank=4, training=TRAINING)
UPCYCLE = Upcycling("tiny", experts=4, per_token=2, rank=2, corpora=("a", "b"), training=TRAINING)


@pytest.fixture
def base(tiny):
    return tiny("llama").requires_grad_(False)


@torch.no_grad()
def divergence(student, teacher, tokens):
    windows = tokens.view(-1, 16)
    ours, theirs = (model(windows).logits.double().log_softmax(-1) for model in (student, teacher))
    return (theirs.exp() * (theirs - ours)).sum(-1).mean().item()


def test_a_masked_model_is_the_split_one(base, tiny, tokens):
    parts = split_parts(base, tokens.view(-1, 16), SPLIT.sizes)
    other = tiny("llama").requires_grad_(False)
    split_model(other, parts)
    with split.masked(base, parts, parts.router):
        torch.testing.assert_close(base(tokens[None, :16]).logits, other(tokens[None, :16]).logits)


def test_distilling_brings_a_split_model_closer_to_its_dense_one(base, tiny, tokens):
    parts = split_parts(base, tokens.view(-1, 16), SPLIT.sizes)
    trained, curve = split.distilled(SPLIT, base, tokens, parts)
    models = [tiny("llama").requires_grad_(False) for _ in range(2)]
    for model, found in zip(models, (parts, trained), strict=True):
        split_model(model, found)
    before, after = (divergence(model, base, tokens) for model in models)
    assert after < 0.7 * before
    assert curve[0]["loss"] == pytest.approx(divergence(models[0], base, TRAINING.windows(tokens, 0)), rel=1e-3)
    assert not torch.equal(trained.router, parts.router)
    again, same = split.distilled(SPLIT, base, tokens, parts)
    assert same == curve
    assert torch.equal(again.router, trained.router)


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


@pytest.mark.parametrize("at_random", [False, True])
def test_a_split_ffn_shares_the_neurons_used_most(base, tokens, at_random):
    parts = split_parts(base, tokens.view(-1, 16), SPLIT.sizes, at_random)
    for layer, (ffn, x) in enumerate(zip(decoder_ffns(base), ffn_inputs(base, tokens.view(-1, 16)), strict=True)):
        used, order = usage(magnitudes(ffn, functional.silu, x)), parts.permutation[layer]
        assert order.sort().values.tolist() == list(range(24))
        assert used[order[:4]].min() >= used[order[4:]].max()
        assert (x @ parts.router[layer].T).std().item() == pytest.approx(1, abs=1e-3)


def test_clusters_are_of_one_size_and_find_groups():
    generator = torch.Generator().manual_seed(0)
    centres = torch.eye(3).repeat_interleave(4, 0)
    rows = functional.normalize(centres + 0.1 * torch.randn(12, 3, generator=generator), dim=1)
    order = torch.randperm(12, generator=generator)
    labels = balanced_clusters(rows[order], 3)
    assert labels.bincount().tolist() == [4, 4, 4]
    groups = [set((order[labels == label] // 4).tolist()) for label in range(3)]
    assert all(len(group) == 1 for group in groups)


def test_usage_by_hand():
    found = torch.tensor([[1.0, 2, 3, 4], [4, 3, 2, 1], [1, 9, 3, 2], [0, 9, 3, 2]])
    assert usage(found).tolist() == [0.25, 0.5, 0, 0.25]


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


def test_folders_of_mixtures_load(base, tiny, tokens, tmp_path, monkeypatch):
    monkeypatch.setattr(split, "FITTED_ON", Calibration(windows=4, sequence_length=16))
    for module in (split, upcycling):
        monkeypatch.setattr(module, "SEQUENCE_LENGTH", 16)
    texts = [tokens, tokens, tokens.flip(0), tokens.flip(0)]
    split.make(SPLIT, tmp_path, base, texts[:2], 2)
    upcycling.make(UPCYCLE, tmp_path, base, texts, 2)
    dense, folder = tiny("llama").requires_grad_(False), tmp_path / "tiny-moe-upcycled"
    mixtral, quality = mixtral_from(dense, folder / EXPERTS, torch.float32), pd.read_csv(folder / "quality.csv")
    assert quality["model"].tolist() == ["dense", "dense", "upcycled", "upcycled"]
    assert perplexity(mixtral, tokens, 16, 2) == pytest.approx(quality["perplexity"][2], rel=0.02)
    loads = pd.read_csv(folder / "routing.csv")
    assert loads.groupby(["text", "layer"])["load"].sum().tolist() == pytest.approx([1] * 6, abs=1e-5)
    folder = tmp_path / "tiny-moe-split"
    split_from(dense, folder / FILE)
    for experts in decoder_experts(dense):
        experts.module.gate.top_k = 4
    quality = pd.read_csv(folder / "quality.csv").set_index("version")
    assert quality.loc["distilled", "experts_active"] == 4
    assert perplexity(dense, tokens, 16, 2) == pytest.approx(quality.loc["distilled", "perplexity"], rel=0.01)
    assert json.dumps({"experts": 4, "per_token": 2, "shared": 4}) in (folder / "README.md").read_text()

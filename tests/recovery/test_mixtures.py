"""Mixtures trained on toy models: split and upcycled ones."""

import pytest
import torch

from toolkit.models.ffn import decoder_ffns
from toolkit.models.mixture import use_per_token
from toolkit.models.split_files import apply
from toolkit.models.splitting import Sizes
from toolkit.models.upcycled import as_mixtral
from toolkit.recovery import split, upcycling
from toolkit.recovery.split import Splitting, split_parts
from toolkit.recovery.training import Training
from toolkit.recovery.upcycling import Upcycling, starting_routers, upcycle

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
    apply(other, parts)
    with split.masked(base, parts, parts.router):
        torch.testing.assert_close(base(tokens[None, :16]).logits, other(tokens[None, :16]).logits)


def test_distilling_brings_a_split_model_closer_to_its_dense_one(base, tiny, tokens):
    parts = split_parts(base, tokens.view(-1, 16), SPLIT.sizes)
    trained, curve = split.distilled(SPLIT, base, tokens, parts)
    models = [tiny("llama").requires_grad_(False) for _ in range(2)]
    for model, found in zip(models, (parts, trained), strict=True):
        apply(model, found)
    before, after = (divergence(model, base, tokens) for model in models)
    assert after < 0.7 * before
    assert curve[0]["loss"] == pytest.approx(divergence(models[0], base, TRAINING.windows(tokens, 0)), rel=1e-3)
    assert not torch.equal(trained.router, parts.router)
    again, same = split.distilled(SPLIT, base, tokens, parts)
    assert same == curve
    assert torch.equal(again.router, trained.router)
    use_per_token(models[1], 4)


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
    assert torch.equal(again.router, parts.router)


@torch.no_grad()
def test_the_mixture_that_trains_is_the_mixtral(base, tokens):
    routers = starting_routers(base, UPCYCLE, [tokens, tokens.flip(0)])
    layers = upcycling.fresh(decoder_ffns(base), UPCYCLE, routers)
    for parts in layers:
        for name in ("gate_up_left", "down_left"):
            parts[name].normal_(std=0.1)
    mixtral = as_mixtral(base, upcycling.experts_of(layers, 2), torch.float32)
    with upcycling.mixed(base, layers, 2) as mixtures:
        found = base(tokens[None, :16]).logits
        assert all(mixture.balance > 0 for mixture in mixtures)
    torch.testing.assert_close(found, mixtral(tokens[None, :16]).logits, rtol=1e-4, atol=1e-4)


def test_balance_by_hand():
    even = torch.full((4, 2), 0.5)
    assert upcycling.balance(even, torch.tensor([[0], [1], [0], [1]])).item() == 1
    uneven = torch.tensor([[0.75, 0.25]]).expand(4, 2)
    assert upcycling.balance(uneven, torch.zeros(4, 1, dtype=torch.int64)).item() == pytest.approx(1.5)

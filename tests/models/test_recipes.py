"""The recipes of the models under `data/models/`, on toy models."""
# ruff: noqa: F811

import importlib.util

import pytest
import torch

from tests.sparsity.conftest import _small, tiny, tokens  # noqa: F401
from toolkit import paths
from toolkit.models.adapters import Adapters
from toolkit.models.ffn import decoder_ffns
from toolkit.models.upcycled import as_mixtral
from toolkit.sparsity import thresholded
from toolkit.sparsity.calibration import Calibration, checked_windows

ZEROS = [0.7, 0.8, 0.6]


def recipe_of(name, **settings):
    """The module of a model's recipe with settings for toys."""
    spec = importlib.util.spec_from_file_location("recipe", paths.root() / "data" / "models" / name / "recipe.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for setting, value in ({"SEQUENCE_LENGTH": 16, "LEARNING_RATE": 0.01, "EVALUATED_ON": (16, 2)} | settings).items():
        assert hasattr(module, setting)
        setattr(module, setting, value)
    return module


@pytest.fixture
def sparse():
    toy = {"STEPS": (3, 2), "ZEROS": (0.7, 0.8), "RANK": 4, "DOWN_RANK": 4}
    return recipe_of("smollm2-135m-sparse90", FITTED_ON=Calibration(windows=4, sequence_length=16), **toy)


@pytest.fixture
def upcycled():
    return recipe_of("smollm2-135m-moe-upcycled", EXPERTS=4, RANK=2, STEPS=60, CORPORA=("a", "b"))


def started(sparse, model, tokens):
    return sparse.refitted(model, Adapters(sparse.fresh(model), torch.zeros(len(ZEROS))), tokens, ZEROS)


def divergence(student, teacher, window):
    """KL of the student's distributions from the teacher's, the slow way."""
    ours, theirs = (model(window).logits.double().softmax(-1) for model in (student, teacher))
    return (theirs * (theirs / ours).log()).sum(-1).mean().item()


@pytest.mark.parametrize(("family", "first"), [("llama", None), ("gemma2", 5)])
@torch.no_grad()
def test_the_first_loss_is_the_divergence_on_a_window_that_begins_as_the_model_expects(
    sparse,
    tiny,
    tokens,
    family,
    first,
):
    options = {"bos_token_id": first, "final_logit_softcapping": None} if first else {}
    model, sparse.FOLLOW = tiny(family, **options).requires_grad_(False), 0.0
    start = started(sparse, model, tokens)
    window = checked_windows(model, sparse.sequence(tokens, 0, 0)[None])
    assert (window[0, 0] == first) == bool(first)
    _, curve = sparse.distil(model, tokens, ZEROS, start, 1, 0)
    with thresholded(tiny(family, **options), start.thresholds) as student:
        assert curve[0]["loss"] == pytest.approx(divergence(student, model, window), rel=1e-4)


@pytest.mark.parametrize("name", ["smollm2-135m-sparse90", "smollm2-135m-moe-upcycled"])
def test_each_part_of_the_text_comes_once_an_epoch(name):
    sequence, tokens = recipe_of(name).sequence, torch.arange(67)
    seen = [torch.cat([sequence(tokens, step, *([0] if "sparse" in name else [])) for step in steps]).tolist()
            for steps in (range(4), range(4, 8))]  # fmt: skip
    assert sorted(seen[0]) == sorted(seen[1]) == list(range(64))
    assert seen[0] != seen[1]


def test_an_upcycled_model_starts_as_the_dense_one_and_learns(upcycled, tiny, tokens):
    model, texts = tiny("llama").requires_grad_(False), [tokens, tokens.flip(0)]
    _, curve = upcycled.upcycle(model, texts)
    windows = torch.stack([upcycled.sequence(text, 0) for text in texts])
    assert curve[0]["loss"] == pytest.approx(model(windows, labels=windows).loss.item(), rel=1e-4)
    assert sum(row["loss"] for row in curve[-5:]) < 0.9 * sum(row["loss"] for row in curve[:5])


@torch.no_grad()
def test_the_mixture_that_trains_is_the_mixtral(upcycled, tiny, tokens):
    base, window = tiny("llama").requires_grad_(False), tokens[None, :16]
    parts = upcycled.fresh(decoder_ffns(base), upcycled.starting_routers(base, [tokens]))
    for name in ("gate_up_left", "down_left"):
        parts[name].normal_(std=0.1)
    mixtral, dense = as_mixtral(base, parts, upcycled.PER_TOKEN, torch.float32), base(window).logits
    with upcycled.mixed(base, parts) as balances:
        logits = base(window).logits
        assert len(balances) == 3
    assert torch.equal(base(window).logits, dense)
    torch.testing.assert_close(logits, mixtral(window).logits, rtol=1e-4, atol=1e-4)


def test_balance_by_hand(upcycled):
    even = torch.full((4, 2), 0.5)
    assert upcycled.balance(even, torch.tensor([[0], [1], [0], [1]])).item() == 1
    uneven = torch.tensor([[0.75, 0.25]]).expand(4, 2)
    assert upcycled.balance(uneven, torch.zeros(4, 1, dtype=torch.int64)).item() == pytest.approx(1.5)

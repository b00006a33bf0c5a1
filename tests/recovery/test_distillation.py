"""Distillation on toy models: it lowers the divergence, and goes on after Ctrl-C and kill -9 as if nothing had been."""

import signal
from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests import processes
from toolkit.models.adapters import Adapters, add
from toolkit.recovery.distillation import adapted, distil_sparse, fresh, refitted, settle
from toolkit.recovery.training import Training
from toolkit.sparsity import thresholded

TRAINING = Training(steps=8, batch=2, sequence_length=16, learning_rate=0.01, warm_up=2, keep_every=2)
ZEROS = [0.7, 0.8, 0.6]


def started(model, tokens, rank, zeros=tuple(ZEROS)):
    adapters = Adapters(fresh(model, rank, rank), torch.zeros(len(zeros)))
    return refitted(model, adapters, tokens.view(-1, 16), zeros)


def divergence(student, teacher, window):
    """KL of the student's distributions from the teacher's, the slow way."""
    ours, theirs = (model(window[None]).logits.double().softmax(-1) for model in (student, teacher))
    return (theirs * (theirs / ours).log()).sum(-1).mean().item()


@pytest.mark.parametrize(("family", "first"), [("llama", None), ("opt", None), ("gemma2", 5)])
@torch.no_grad()
def test_the_first_loss_is_the_divergence_on_windows_that_begin_as_the_model_expects(
    tiny, tokens, tmp_path, family, first
):
    """Gemma's with its first token, in what thresholds are fitted on and in what is distilled."""
    options = {"bos_token_id": first, "final_logit_softcapping": None} if first else {}
    model, training = tiny(family, **options).requires_grad_(False), replace(TRAINING, steps=1, follow=0.0)
    windows = training.windows(tokens, 0)
    begun = windows.index_fill(1, torch.tensor(0), first) if first else windows
    start = started(model, windows, 2)
    assert torch.equal(start.thresholds, settle(tiny(family), begun, ZEROS))
    _, curve = distil_sparse(model, tokens, ZEROS, start, training, tmp_path / "state")
    with thresholded(tiny(family, **options), start.thresholds) as student:
        expected = [divergence(student, model, window) for window in begun]
    assert curve[0]["loss"] == pytest.approx(sum(expected) / 2, rel=1e-4)


@pytest.mark.parametrize("family", ["llama", "opt"])
def test_training_brings_a_cut_model_closer_to_its_dense_one(tiny, tokens, tmp_path, family):
    model = tiny(family).requires_grad_(False)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    training, start = replace(TRAINING, steps=30), started(model, tokens, 4)
    found, curve = distil_sparse(model, tokens, ZEROS, start, training, tmp_path / "state")
    assert sum(row["loss"] for row in curve[-3:]) < 0.8 * sum(row["loss"] for row in curve[:3])
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    merged = tiny(family)
    add(merged, found)
    with adapted(model, found), torch.no_grad():
        assert torch.allclose(model(tokens[None, :16]).logits, merged(tokens[None, :16]).logits, atol=1e-4)


def test_it_goes_on_after_an_interruption(tiny, tokens, tmp_path, monkeypatch):
    model = tiny().requires_grad_(False)
    start = started(model, tokens, 2)
    whole, curve = distil_sparse(model, tokens, ZEROS, start, TRAINING, tmp_path / "whole")
    state, rate = tmp_path / "state", Training.rate
    monkeypatch.setattr(Training, "rate", lambda self, step: rate(self, step) if step < 5 else interrupt())
    with pytest.raises(KeyboardInterrupt):
        distil_sparse(model, tokens, ZEROS, start, TRAINING, state)
    monkeypatch.setattr(Training, "rate", rate)
    again, continued = distil_sparse(model, tokens, ZEROS, start, TRAINING, state)
    assert continued == curve
    assert torch.equal(again.thresholds, whole.thresholds)
    for name, low in whole.differences.items():
        assert torch.equal(low.left, again.differences[name].left)
        assert torch.equal(low.right, again.differences[name].right)


def interrupt():
    raise KeyboardInterrupt


KILLED = """
import os, signal
from pathlib import Path
from tests.recovery.test_distillation import small
from toolkit.recovery.distillation import distil_sparse
from toolkit.recovery.training import Training
rate = Training.rate
Training.rate = lambda self, step: os.kill(os.getpid(), signal.SIGKILL) if step == 5 else rate(self, step)
distil_sparse(*small(), state=Path("{state}"))
"""


def small():
    """Arguments of `distil`, the same in every process."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    sizes = {"vocab_size": 61, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2}
    config = LlamaConfig(**sizes, num_hidden_layers=2, initializer_range=0.2)
    model, tokens = LlamaForCausalLM(config).eval().requires_grad_(False), torch.randint(0, 61, (96,))
    zeros = [0.7, 0.7]
    return (
        model,
        tokens,
        zeros,
        started(model, tokens, 2, zeros),
        Training(steps=6, batch=1, sequence_length=16, keep_every=2),
    )


def test_it_goes_on_after_a_kill(tmp_path, one_thread):
    assert processes.ended(KILLED.format(state=tmp_path / "state")) == -signal.SIGKILL
    assert [file.name for file in tmp_path.iterdir()] == ["state"]
    _, curve = distil_sparse(*small(), state=tmp_path / "state")
    assert curve == distil_sparse(*small(), state=tmp_path / "whole")[1]


def test_each_part_of_the_text_comes_once_an_epoch():
    tokens = torch.arange(67)
    training = Training(batch=2, sequence_length=16)
    seen = torch.cat([training.windows(tokens, step) for step in range(2)])
    assert sorted(seen.flatten().tolist()) == list(range(64))
    assert not torch.equal(seen, torch.cat([training.windows(tokens, step) for step in (2, 3)]))
    assert torch.equal(training.windows(tokens, 3), training.windows(tokens, 3))

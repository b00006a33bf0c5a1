"""Predictors in files and in training: given back as they were, against what a linear guess can reach."""

import logging
import math

import pytest
import torch

from toolkit import tensor_files
from toolkit.errors import UserError
from toolkit.predictors import STORED, LowRank, Samples, load_predictors, prediction_quality, save_predictors
from toolkit.predictors.files import FILE
from toolkit.predictors.low_rank import balanced_loss, reduced_rank


@pytest.fixture
def kept(setting, predictors_of):
    """Predictors of one kind and the samples: `kept(kind)`."""

    def make(kind):
        model, limits, samples = setting()
        return predictors_of(kind, model, limits, samples), samples

    return make


@pytest.mark.parametrize("kind", STORED)
def test_a_file_gives_predictors_back(kept, kind, tmp_path):
    predictors, samples = kept(kind)
    save_predictors(tmp_path / "file", "tiny", predictors)
    found = load_predictors(tmp_path / "file", "tiny")
    for layer, (one, other) in enumerate(zip(found, predictors, strict=True)):
        assert (type(one), one.limit, one.nbytes) == (type(other), other.limit, other.nbytes)
        assert torch.equal(one.scores(samples.inputs[layer]), other.scores(samples.inputs[layer]))


def test_the_tensors_of_a_layer_are_let_go_as_its_predictor_is_made(kept, tmp_path, monkeypatch):
    """Some predictors keep copies in another order: a file and all copies would take twice the memory."""
    predictors, _ = kept("few_bits")
    save_predictors(tmp_path / "file", "tiny", predictors)
    load_for, given = tensor_files.load_for, []
    monkeypatch.setattr(tensor_files, "load_for", lambda *where: given.append(load_for(*where)) or given[0])
    assert len(load_predictors(tmp_path / "file", "tiny")) == len(predictors)
    assert given[0][1] == {}


def test_a_layer_without_predictor_loads_all_and_says_so(kept, tmp_path, caplog):
    predictors, _ = kept("low_rank")
    save_predictors(tmp_path / "file", "tiny", [None, *predictors[1:]])
    with caplog.at_level(logging.WARNING):
        found = load_predictors(tmp_path / "file", "tiny")
    assert found[0] is None
    assert "no predictor for layers [0] of tiny: they load every neuron" in caplog.text


def test_files_of_another_model_and_inconsistent_ones_are_refused(kept, tmp_path):
    file = tmp_path / "file"
    save_predictors(file, "tiny", kept("low_rank")[0])
    with pytest.raises(UserError, match="predictors of model 'tiny'; expected 'opt'"):
        load_predictors(file, "opt")
    about, tensors = tensor_files.load(file, FILE)
    tensor_files.save(file, FILE, about, tensors | {"0.outward": torch.zeros(48, 5)})
    with pytest.raises(UserError, match="inconsistent predictors"):
        load_predictors(file, "tiny")


@pytest.fixture
def learnable():
    """Two layers whose neurons fire by a rule of rank 3."""
    generator = torch.Generator().manual_seed(0)
    inputs, outputs = [], []
    for _ in range(2):
        x = torch.randn(2048, 24, generator=generator)
        rule = torch.randn(40, 3, generator=generator) @ torch.randn(3, 24, generator=generator)
        inputs.append(x)
        outputs.append((x @ rule.T - 4).relu())
    return Samples(tuple(inputs), tuple(outputs), (torch.ones(40),) * 2)


def test_a_rule_of_low_rank_is_learnt(learnable):
    table = prediction_quality(LowRank.train(learnable, 3, epochs=30, dtype=torch.float32), learnable)
    assert (table["recall"] > 0.95).all()
    assert (table["false_positives"] < 0.2).all()
    poor = prediction_quality(LowRank.train(learnable, 1, epochs=30, dtype=torch.float32), learnable)
    assert (poor["recall"] - poor["false_positives"] < table["recall"] - table["false_positives"]).all()


def test_training_repeats_itself_and_takes_ranks_by_layer(learnable):
    first, second = (LowRank.train(learnable, [2, 5], epochs=1, seed=3) for _ in range(2))
    assert [one.rank for one in first] == [2, 5]
    assert all(torch.equal(one.outward, other.outward) for one, other in zip(first, second, strict=True))


def test_the_start_is_the_best_linear_guess():
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(200, 6, generator=generator), torch.randn(200, 8, generator=generator)
    inward, outward = reduced_rank(x, y, 6)
    full = torch.linalg.lstsq(x, y).solution.T
    assert torch.allclose(outward @ inward, full, atol=5e-3)
    values, vectors = torch.linalg.eigh((x @ full.T).T @ (x @ full.T))  # guesses, then their main directions
    best = full.T @ vectors[:, -2:] @ vectors[:, -2:].T
    inward, outward = reduced_rank(x, y, 2)
    assert torch.allclose((outward @ inward).T, best, atol=5e-3)
    assert values[0] >= -1e-3


def test_the_loss_weighs_active_neurons_like_the_others():
    bits = torch.tensor([[1.0, 0.0, 0.0, 0.0]])
    unsure_of_active = torch.tensor([[0.0, -99.0, -99.0, -99.0]])
    unsure_of_others = torch.tensor([[99.0, 0.0, 0.0, 0.0]])
    losses = [balanced_loss(logits, bits, bits.mean()).item() for logits in (unsure_of_active, unsure_of_others)]
    assert losses == pytest.approx([0.75 * math.log(2)] * 2)

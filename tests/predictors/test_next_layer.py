"""The next layer's experts and neurons, foretold: the control, worked examples, and what the rivals say."""

import numpy as np
import pytest
import torch
from torch.nn import functional

from tests.models.test_experts import mixtures as mixture
from tests.notebook_code import functions_of
from toolkit.errors import UserError
from toolkit.predictors import Context, CopyLast, Samples, prediction_quality
from toolkit.predictors.next_layer import (
    NextLayer,
    OwnGate,
    expert_samples,
    gate_limits,
    predict_experts,
    predict_neurons,
)
from toolkit.sparsity.recording import mixtures, record_routing

TOKENS = torch.arange(100) * 7 % 31


@pytest.fixture(scope="module", params=["Mixtral", "Qwen3Moe", "Olmoe"])
def model(request):
    return mixture(request.param)


@pytest.fixture(scope="module")
def samples(model):
    return expert_samples(model, TOKENS, windows=2, sequence_length=12)


def test_samples_are_the_routing(model, samples):
    trace = record_routing(model, "tiny", TOKENS, "numbers", windows=2, sequence_length=12)
    for layer in range(trace.layers):
        assert torch.equal(samples.active(layer), trace.active(layer).flatten(0, 1))
        torch.testing.assert_close(samples.outputs[layer], trace.weights[layer].flatten(0, 1))
    assert samples.length == 12


def test_the_own_gate_is_always_right(model, samples):
    found = prediction_quality(OwnGate.of_model(model), samples, prompt=1)
    assert (found[["accuracy", "recall", "precision", "kept"]] == 1).all(axis=None)
    assert (found["predicted"] == 0.5).all()


def test_the_next_layer_as_by_hand(model, samples):
    found = prediction_quality(NextLayer.of_model(model), samples, prompt=1)
    assert (found["recall"][0], found["predicted"][0], found["nbytes"].sum()) == (0, 0, 0)
    before = Samples(samples.inputs[:-1], samples.outputs[1:], samples.norms[1:], samples.length)
    ahead = prediction_quality(OwnGate.of_model(model)[1:], before, prompt=1)
    columns = ["predicted", "accuracy", "recall", "precision", "kept"]
    assert ahead.loc[0, columns].tolist() == found.loc[1, columns].tolist()
    second = mixtures(model)[1]
    hits = 0
    for token in range(24):
        named = functional.linear(samples.inputs[0][token], second.gate.weight).argsort(descending=True)[:3].tolist()
        used = np.flatnonzero(samples.active(1)[token])
        assert predict_experts(samples.inputs[0][token][None], second)[0].tolist() == named
        hits += len({*named} & {*used.tolist()}) * (token % 12 > 0)
    assert found["recall"][1] == found["precision"][1] == pytest.approx(hits / (22 * 3))


def test_neurons_as_by_hand(model, samples):
    first, second = mixtures(model)
    limits = gate_limits(model, samples, 0.5, "silu")
    found = functions_of("corm/fig05").neuron_quality(model, samples, limits, "silu", samples, 0)
    found = found.set_index(["layer", "predictor"])
    assert (found.xs("own_gate", level="predictor")[["accuracy", "recall", "precision"]] == 1).all(axis=None)
    assert (0, "next_layer") not in found.index
    both = active = predicted = wanted = 0
    for token in range(24):
        named = predict_experts(samples.inputs[0][token][None], second)[0].tolist()
        for expert in np.flatnonzero(samples.active(1)[token]):
            gate = second.matrices(expert)[0]
            right = functional.silu(gate @ samples.inputs[1][token]).abs() > limits[1]
            guess = functional.silu(gate @ samples.inputs[0][token]).abs() > limits[1]
            assert torch.equal(
                predict_neurons(samples.inputs[0][token][None], second, expert, "silu", limits[1])[0], guess
            )
            wanted += int(right.sum())
            if expert in named:
                both, active, predicted = (
                    both + int((right & guess).sum()),
                    active + int(right.sum()),
                    predicted + int(guess.sum()),
                )
    row = found.loc[1, "next_layer"]
    assert (row["recall"], row["precision"]) == pytest.approx((both / active, both / predicted))
    assert row["found"] == pytest.approx(both / wanted)
    every = torch.cat([
        functional.silu(first.matrices(expert)[0] @ samples.inputs[0][token]).abs()
        for token in range(24) for expert in np.flatnonzero(samples.active(0)[token])
    ])  # fmt: skip
    assert (every > limits[0]).float().mean().item() == pytest.approx(0.5, abs=0.01)
    with pytest.raises(UserError, match="zeros: 1"):
        gate_limits(model, samples, 1, "silu")


def test_rivals_by_hand():
    active = torch.tensor([[0, 1, 1, 0], [0, 1, 0, 1], [0, 1, 1, 0]], dtype=torch.bool)
    notebook = functions_of("corm/fig05")
    profile = notebook.Profile(active, 2)
    context = Context(0, [torch.zeros(0)])
    assert profile.predict(context).tolist() == [1, 2]
    chance = notebook.Chance(4, count=2, seed=3)
    chance.start([])
    first = [chance.predict(context).tolist() for _ in range(5)]
    chance.start([])
    assert first == [chance.predict(context).tolist() for _ in range(5)]
    assert all(len(set(one)) == 2 for one in first)
    last = CopyLast(4, 0)
    last.start([np.array([1, 2])])
    assert last.predict(context).tolist() == [1, 2]

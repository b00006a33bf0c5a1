"""Predictors with a state, stepped by hand."""

import numpy as np
import pytest
import torch

from toolkit.predictors import CopyLast, Predictor, Samples, predicted, prediction_quality
from toolkit.sparsity.thresholds import watched


def test_quality_steps_each_sequence_from_its_first_token():
    """Two sequences of two tokens. The first token of each is its prompt; the others copy the one before."""
    outputs = torch.tensor([[1.0, 0, 0], [1, 2, 0], [0, 0, 3], [0, 3, 3]])
    samples = Samples((torch.zeros(4, 2),), (outputs,), (torch.ones(3),), length=2)
    (row,) = prediction_quality([CopyLast(3, 2)], samples).itertuples()
    assert row.predicted == pytest.approx((3 + 1 + 3 + 1) / 12)  # all, neuron 0, all, neuron 2
    assert row.recall == pytest.approx((1 + 1 + 1 + 1) / 6)
    assert row.precision == 4 / 8


class Diary(Predictor):
    """Predicts every other neuron, and writes down what it is given."""

    name, stateful = "diary", True

    def __init__(self):
        self.contexts, self.observed = [], []

    @property
    def shape(self):
        return 48, 32

    def start(self, prefill):
        (first,) = prefill
        self.observed.append(first)

    def predict(self, context):
        self.contexts.append((context.layer, [x.clone() for x in context.inputs], list(context.active)))
        return np.arange(0, 48, 2)

    def observe(self, active):
        self.observed.append(active)


def test_in_place_a_predictor_sees_inputs_of_all_layers_so_far_and_what_fired_of_what_it_predicted(setting, tokens):
    model, limits, _ = setting()
    diaries, outputs = [Diary() for _ in range(3)], []
    with predicted(model, limits, diaries), watched(model, lambda _, values: outputs.append(values[0].float())):
        model(tokens[None, :4])
    for layer, diary in enumerate(diaries):
        assert [context[0] for context in diary.contexts] == [layer] * 3  # not for the first token
        assert [len(inputs) for _, inputs, _ in diary.contexts] == [layer + 1] * 3
        fired = [np.flatnonzero(row) for row in (outputs[layer] != 0).numpy()]
        assert all(map(np.array_equal, diary.observed, fired))
        assert all((neurons % 2 == 0).all() for neurons in diary.observed[1:])
        for token, (_, _, active) in enumerate(diary.contexts, start=1):
            assert all(map(np.array_equal, active, (before.observed[token] for before in diaries[:layer])))

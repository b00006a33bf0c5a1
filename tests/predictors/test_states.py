"""The table of states and the parents: hand-worked examples of Hermes, plain loops as oracles, faults."""

import doctest

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from toolkit.errors import UserError
from toolkit.predictors import (
    Context,
    LayerCorrelation,
    Samples,
    StateAndParents,
    TokenState,
    prediction_quality,
    state_table,
)
from toolkit.predictors import states as predictors
from toolkit.predictors.states import Parents, load_parents, parents_of, save_parents, starting_states, table_nbytes
from toolkit.sparsity.synthetic import BetaLaw, draw, ranks


def with_states(predictor, values):
    predictor._table = state_table.packed(np.array(values, np.uint8))
    return predictor


def predicted(predictor, *earlier):
    return predictor.predict(Context(len(earlier), (), earlier)).tolist()


def test_states_move_as_in_the_paper():
    table = with_states(TokenState(5, 2), [13, 10, 0, 15, 11])
    assert predicted(table) == [3]
    table.observe(np.array([0, 4]))
    assert table.states.tolist() == [15, 9, 0, 14, 15]
    assert predicted(table) == [0, 4]


def test_parents_add_six_each():
    """9 and one active parent are predicted, 14 and none are not, 3 and two are; 0 and two are not."""
    parents = Parents(np.array([[0, 1, 0, 0], [1, 2, 3, 3]], np.uint16), before=4)
    layer = with_states(StateAndParents(4, 2, parents=parents), [9, 14, 3, 0])
    assert predicted(layer, np.array([1]), np.array([0, 3])) == [0, 2]  # the layer right before counts
    assert predicted(layer, np.array([], np.int64)) == []
    first = with_states(StateAndParents(4, 2), [9, 14, 3, 15])
    assert predicted(first) == [3]
    alone = LayerCorrelation(4, 2, parents=parents)
    alone.observe(np.array([1]))
    assert predicted(alone, np.array([0, 3])) == [2, 3]
    assert predicted(LayerCorrelation(4, 2)) == []


def test_a_prompt_starts_the_states_in_sixteen_stages():
    usage = np.array([0, 0.0199, 0.02, 0.08, 0.09, 0.5, 0.89, 0.90, 0.901, 1])
    assert starting_states(usage).tolist() == [0, 0, 1, 1, 2, 8, 14, 14, 15, 15]
    assert sorted(set(starting_states(np.linspace(0, 1, 1000)).tolist())) == list(range(16))
    table = TokenState(3, 2)
    table.start([np.array([0, 1]), np.array([0])])
    assert table.states.tolist() == [15, 8, 0]
    table.start([])
    assert table.states.tolist() == [0, 0, 0]


def test_bytes_of_llama_7b():
    """232 KiB with the 10.5K neurons that the paper names, 236 with the model's 11,008; a parent takes 2 bytes."""
    assert doctest.testmod(predictors).failed == 0
    assert table_nbytes(*[4096 + 10.5 * 1024] * 32) == 232 * 1024
    assert table_nbytes(*[4096 + 11008] * 32) == 236 * 1024
    assert TokenState(11008, 4096).nbytes == 5504
    parents = Parents(np.zeros((2, 11008), np.uint16), 11008)
    assert StateAndParents(11008, 4096, parents=parents).nbytes == 5504 + 4 * 11008
    assert LayerCorrelation(11008, 4096, parents=parents).nbytes == 4 * 11008
    assert LayerCorrelation(11008, 4096).nbytes == 0


@given(st.integers(1, 70), st.integers(0, 15), st.integers(0, 15), st.integers(0, 60), st.integers(0, 20), st.randoms())
def test_kernels_are_plain_loops(neurons, gain, loss, threshold, weight, random):
    values = [random.randint(0, 15) for _ in range(neurons)]
    active = np.array([random.random() < 0.4 for _ in range(neurons)])
    table = state_table.packed(np.array(values, np.uint8))
    assert state_table.unpacked(table, neurons).tolist() == values
    before = np.array([random.random() < 0.5 for _ in range(9)])
    parents = np.array([[random.randrange(9) for _ in range(neurons)] for _ in range(2)], np.uint16)
    found = np.empty((2, neurons), bool)
    state_table.predict(table, threshold, found[0])
    state_table.predict(table, threshold, found[1], parents, before, weight)
    assert found[0].tolist() == [value >= threshold for value in values]
    sums = [value + weight * sum(before[parents[:, i]].tolist()) for i, value in enumerate(values)]
    assert found[1].tolist() == [total >= threshold for total in sums]
    state_table.observe(table, active, gain, loss)
    moved = [min(15, v + gain) if on else max(0, v - loss) for v, on in zip(values, active, strict=True)]
    assert state_table.unpacked(table, neurons).tolist() == moved


def test_parents_are_the_most_correlated_neurons():
    generator = np.random.default_rng(0)
    before = generator.random((300, 6)) < [0.5, 0.5, 0.5, 0.2, 1, 0]  # one always fires, one never does
    after = before[:, [3, 0, 1]].copy()
    after[::7] ^= True
    after[:, 2] |= before[:, 2]
    found = Parents.of(torch.from_numpy(before), torch.from_numpy(after))
    with np.errstate(invalid="ignore"):
        naive = [np.nan_to_num(np.corrcoef(before.T, column)[-1, :-1]) for column in after.T.astype(float)]
    assert found.neurons.T.tolist() == [np.argsort(-row)[:2].tolist() for row in naive]
    assert found.neurons[0, :2].tolist() == [3, 0]
    assert set(found.neurons[:, 2].tolist()) == {1, 2}
    assert (found.neurons.dtype, found.before) == (np.uint16, 6)


def test_parents_of_a_drawn_trace_are_those_it_was_drawn_with():
    law = BetaLaw(0.3, 0.6, 0.8)
    trace = draw("toy", [law] * 3, neurons=60, tokens=2000, copied=0.8)
    parents = parents_of(trace)
    assert parents[0] is None
    for layer in (1, 2):
        right = np.empty(60, np.int64)
        right[ranks(60, layer)] = ranks(60, layer - 1)
        varied = ((usage := trace.active(layer)[0].float().mean(0)) > 0.05) & (usage < 0.95)
        assert (parents[layer].neurons[0] == right)[varied].all()
    samples = Samples.of(trace)
    tables = [prediction_quality([kind(60, 0) for _ in range(3)], samples, prompt=100) for kind in (TokenState,)]
    tables.append(prediction_quality([StateAndParents(60, 0, parents=one) for one in parents], samples, prompt=100))
    state, both = (table.set_index("layer")["recall"] for table in tables)
    assert both[0] == state[0]
    assert (both[1:] > state[1:] + 0.02).all()


def test_a_file_gives_parents_back(tmp_path):
    trace = draw("toy", [BetaLaw(0.3, 0.6, 0.8)] * 3, neurons=20, tokens=90)
    parents, path = parents_of(trace), tmp_path / "parents.safetensors"
    save_parents(path, "toy", parents)
    found = load_parents(path, "toy")
    assert found[0] is None
    assert all(np.array_equal(one.neurons, two.neurons) for one, two in zip(found[1:], parents[1:], strict=True))
    with pytest.raises(UserError, match="of model 'toy'; expected 'other'"):
        load_parents(path, "other")
    with pytest.raises(UserError, match="parents of 20 neurons for a layer of 21"):
        StateAndParents(21, 2, parents=parents[1])
    with pytest.raises(UserError, match="neuron 25 fired"):  # beyond the table
        predicted(StateAndParents(20, 2, parents=parents[1]), np.array([3, 25]))

"""Studies of routing on a tiny random mixture: the tables agree with the replays and predictors."""

import numpy as np
import pytest
import torch

from tests.models.test_experts import mixtures as mixture
from tests.notebook_code import functions_of
from toolkit.papers.corm import routing
from toolkit.papers.corm.routing import RoutedModel
from toolkit.sparsity.trace import Trace, pack
from toolkit.studies import loaded

fig06 = functions_of("corm/fig06")


@pytest.fixture
def setting(monkeypatch, tmp_path):
    monkeypatch.setenv("TOOLKIT_CACHE_DIR", str(tmp_path))
    model = mixture("Mixtral")
    for module in (routing, loaded):  # the latter makes the key of what is kept
        monkeypatch.setattr(module, "loaded", lambda name: (model, None, "checksum of " + name))
    tokens = {"calibration": torch.arange(90) * 5 % 31, "evaluation": torch.arange(90) * 7 % 31}
    monkeypatch.setattr(routing, "tokens_of", lambda model, corpus, split: tokens[split])
    yield RoutedModel("tiny", "numbers", windows=2, sequence_length=20)
    for each in (routing.samples, routing.limits, routing.routing_of):
        each.cache_clear()


def random_trace(layers=3, tokens=60, experts=8, used=2, seed=0):
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(layers, 1, tokens, experts, generator=generator)
    active = torch.zeros(scores.shape, dtype=torch.bool).scatter_(-1, scores.topk(used).indices, True)
    ids = torch.zeros(1, tokens, dtype=torch.int32)
    return Trace("tiny", "random", ids, (experts,) * layers, tuple(map(pack, active)), "expert")


def test_predictions_have_every_kind_and_a_perfect_control(setting, monkeypatch):
    network = routing.loaded("tiny")[0]
    notebook = functions_of("corm/fig05")
    known = {"seed": 0, "loaded": lambda name: (network, None, "checksum")}
    for name, value in known.items():
        monkeypatch.setitem(notebook.expert_predictions.__globals__, name, value)
    experts, neurons = notebook.expert_predictions(setting), notebook.neuron_predictions(setting)
    assert set(experts["predictor"]) == {"next_layer", "own_gate", "copy_last", "profile", "random"}
    assert set(neurons["predictor"]) == {"next_layer", "own_gate", "previous", "profile", "random"}
    for table in (experts, neurons):
        assert (table.loc[table["predictor"] == "own_gate", ["accuracy", "recall"]] == 1).all(axis=None)
        assert table[table["predictor"] == "next_layer"]["layer"].tolist() == [1]


def test_what_is_needed_and_foretold(setting, monkeypatch):
    network = routing.loaded("tiny")[0]
    known = {"loaded": lambda name: (network, None, "checksum"), "memory_shares": [0.5, 0.6, 1.0], "layer_step": 1}
    for name, value in known.items():
        monkeypatch.setitem(fig06.two_levels.__globals__, name, value)
    needed, expected = fig06.own_tokens(setting)
    trace = routing.routing_of(setting)
    for layer in range(2):
        for token in range(20):
            assert sorted(needed[layer][token]) == np.flatnonzero(trace.active(layer)[0, token]).tolist()
    assert expected[0] == [None] * 20
    assert all(len(token) == 3 for token in expected[1])
    table = fig06.own_two_levels(setting)
    assert table["slots"].tolist() == [3, 4, 6, 3, 4, 6]
    plain, ahead = (rows.reset_index() for _, rows in table.groupby(table["trace"] == "recorded, ahead"))
    assert (plain[["prefetched_share", "wasted_share", "predicted_share"]] == 0).all(axis=None)
    assert (ahead["predicted_share"] > 0.1).all()
    assert (ahead["wasted_share"] <= ahead["prefetched_share"])[:2].all()  # with all slots, waste is of the first half
    assert (plain["loaded_share"] <= plain["needed_share"]).all()


def test_policies_lie_between_nothing_and_the_optimum():
    trace = random_trace()
    table = routing.policy_table(trace, [0.25, 0.5, 0.75, 1.0]).pivot(
        index="slots", columns="policy", values="expert_hits"
    )
    assert table.index.tolist() == [2, 4, 6, 8]
    assert (table.to_numpy() <= table[["belady"]].to_numpy() + 1e-12).all()
    assert table.loc[8].min() == 1  # all experts came in the first half
    assert routing.every(trace, 2).units == (8, 8)

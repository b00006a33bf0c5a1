"""The engine's counts while it loads experts are those of a replay of its routing."""

import pytest
import torch

from tests.models.test_experts import mixtures
from tests.notebook_code import functions_of
from toolkit.errors import UserError
from toolkit.models.architectures import ARCHITECTURES, ModelShape
from toolkit.models.twins import twin_mixture
from toolkit.offload.expert_ffn import RecordedRouter
from toolkit.offload.model import OffloadedModel
from toolkit.offload.options import Demand
from toolkit.papers.corm import expert_race
from toolkit.papers.corm.expert_race import RACED, ExpertRace, counts, race_table, replayed, routing_of
from toolkit.storage.experts import RandomExperts, WholeExperts
from toolkit.storage.packing import pack_model

LAYERS = 4


@pytest.fixture(scope="module")
def race(tmp_path_factory):
    """A tiny random mixture; `model` names the race, so that nothing else is kept under its name."""
    folder = tmp_path_factory.mktemp("race")
    torch.manual_seed(0)
    changes = {"num_hidden_layers": LAYERS, "hidden_size": 64, "intermediate_size": 2048, "sliding_window": None}
    pack_model(mixtures("Mixtral", **changes), folder / "store", WholeExperts())
    tokens = list(torch.randint(61, (30, 1, 1), generator=torch.Generator().manual_seed(1)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(expert_race, "_folder", lambda race: folder / "store")
        patch.setattr(expert_race, "_tokens", lambda race: tokens)
        yield ExpertRace(str(folder), share=0.5, tokens=24, skipped=6, repetitions=1)


@pytest.mark.parametrize("way", RACED)
def test_the_engine_counts_what_a_replay_counts(race, way):
    found = counts(race, way)
    assert found == replayed(race, way)
    assert found["needed"] == 3 * LAYERS * 30
    assert routing_of(race)[1][0] == [[]] * 30  # nothing is predicted for the first layer
    if not RACED[way].prefetch:
        assert found["prefetched"] == 0
    if way == "on demand":
        assert found["late"] == found["needed"]
    else:
        assert 0 < found["late"] < found["needed"]


def test_all_ways_race_under_one_limit(race):
    table = race_table(race, fresh=True).set_index("way")
    assert list(table.index) == list(RACED)
    assert (table["expert_hits"] == table["replayed_hits"]).all()
    assert table["limit_mb"].nunique() == 1
    assert (table["neuron_hits"] == table["expert_hits"]).all()
    assert table.loc["on demand", ["over_demand", "over_demand_low", "over_demand_high"]].tolist() == [1, 1, 1]
    rates = table["tokens_per_s"] / table.loc["on demand", "tokens_per_s"]
    assert table["over_demand"].tolist() == pytest.approx(rates.tolist())  # one turn
    assert table.loc["both", "read_mb"] < table.loc["on demand", "read_mb"] < table.loc["look-ahead", "read_mb"]


def test_exact_mode_gives_the_logits_of_all_experts_in_memory_and_the_papers_does_not(race):
    table = functions_of("corm/tab02").mode_table(race).set_index("way")
    assert list(table.index) == ["all experts in memory", "exact", "as the paper"]
    assert table["memory"].tolist() == [1, 0.5, 0.5]
    assert table.loc["exact", "logit_difference"] == table.loc["exact", "log_difference"] == 0
    assert table.loc["as the paper", "logit_difference"] > 1e-3
    assert table["perplexity"].nunique() == 2


def test_a_twin_has_its_experts_on_disk_alone_and_is_routed_as_recorded(tmp_path, monkeypatch):
    small = ModelShape(2, 64, 128, 4, 1000, 2, 16, experts=4, experts_per_token=2)
    monkeypatch.setitem(ARCHITECTURES, "small", small)
    twin = twin_mixture("small", 2)
    assert all(it.is_meta == (".experts." in name) for name, it in twin.named_parameters())
    pack_model(twin, tmp_path / "store", RandomExperts(), "small")
    chosen = torch.tensor([[0, 3], [0, 1], [2, 3]])

    def routing(layer, experts):
        return RecordedRouter(experts, chosen, chosen)

    with (
        OffloadedModel.open(tmp_path / "store", demand=Demand(routing=routing, look_ahead=False)) as engine,
        torch.no_grad(),
    ):
        for held in ([0, 3], [0, 1, 3], [0, 1, 2, 3]):
            assert engine.model(torch.tensor([[7]])).logits.isfinite().all()
            for ffn in engine.strategy.ffns:
                assert ffn.slots.cache.residency.held.nonzero()[0].tolist() == held
    with pytest.raises(UserError, match="unknown mixture of experts 'opt-13b'"):
        twin_mixture("opt-13b", 2)

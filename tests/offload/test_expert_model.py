"""A mixture whose experts come from disk gives what it gives in memory, to the bit at any budget, through trouble."""

import copy
import errno
import json
from concurrent.futures import Future
from contextlib import nullcontext

import pytest
import torch

from tests.models.test_experts import mixtures
from tests.offload.conftest import in_parts, opened
from toolkit.errors import UserError
from toolkit.models import decoder_blocks
from toolkit.models.experts import decoder_experts, mixtures_by_layer
from toolkit.offload.expert_ffn import RecordedRouter, Router
from toolkit.offload.expert_slots import ExpertSlots
from toolkit.quantization import neuron_records
from toolkit.residency.policies import Lfu
from toolkit.storage.experts import WholeExperts, expert_weights
from toolkit.storage.packing import pack_model, tensors_beside

PROMPT = torch.tensor([[5, 17, 3, 44, 8, 1]])
GREEDY = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
FAMILIES = ("Qwen2Moe", "DeepseekV2")  # experts that all tokens use, a first block without any; `test_families` has all
CHANGES = {"DeepseekV2": {"num_key_value_heads": 4}}  # its attention has as many as heads
COUNT = 6  # experts of a layer
# four layers, so that look-ahead has something to do, of 1.6 MB an expert, so that a budget decides
LARGE = {"num_hidden_layers": 4, "hidden_size": 64, "intermediate_size": 2048, "sliding_window": None}
pytestmark = pytest.mark.usefixtures("one_thread")


class Packed:
    """A mixture and its folder."""

    def __init__(self, family, folder, **changes):
        torch.manual_seed(0)
        self.folder, self.model = folder, mixtures(family, **changes)
        pack_model(self.model, folder, WholeExperts(), family)

    @classmethod
    def of(cls, folder):
        """A folder that was packed elsewhere."""
        made = cls.__new__(cls)
        made.folder = folder
        return made

    def expected(self):
        return self.model.generate(PROMPT, **GREEDY)

    def generated(self, **options):
        with opened(self.folder, **options) as ours:
            found = ours.generate(PROMPT, **GREEDY)
            assert ours.budgets["dram"].used_bytes <= ours.budgets["dram"].limit_bytes
            return found


@pytest.fixture(scope="module", params=FAMILIES)
def packed(request, tmp_path_factory):
    return Packed(request.param, tmp_path_factory.mktemp("experts") / "store", **CHANGES.get(request.param, {}))


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory):
    return Packed("Mixtral", tmp_path_factory.mktemp("experts") / "store", **LARGE)


def budget_of(packed, slots):
    """The budget that holds so many experts of each layer and no more."""
    with opened(packed.folder, verify=False) as ours:
        room = sum(ffn.slots.cache.experts for ffn in ours.strategy.ffns)
        slot = ours.strategy._slot_bytes
        taken = dict(ours.budgets["dram"].taken)
        whole = taken.pop("slots")
        layers = len(ours.strategy.ffns)
        return sum(taken.values()) + whole - (room - slots * layers) * slot


def logits(packed, tokens, **options):
    """The logits of a prompt, of tokens one by one, and of a few at once, after another text."""
    with opened(packed.folder, verify=False, **options) as ours, torch.no_grad():
        ours.model(tokens.flip(1))
        return in_parts(ours.model, tokens, (12, 1, 1, 1, 5, 1, 3)), [ffn.slots for ffn in ours.strategy.ffns]


def _least_liked(self, x):
    """In the place of `Router.predict`: the experts that the router likes least."""
    return self.experts.scores(x).topk(3, largest=False).indices


@pytest.mark.parametrize("options", [{"look_ahead": False}, {"window": 0}, {"window": 0, "look_ahead": False}])
def test_tokens_are_those_of_the_model_in_memory(mixtral, options):
    assert torch.equal(mixtral.generated(**options), mixtral.expected())


def test_tokens_and_logits_of_every_family_are_those_of_the_model_in_memory(packed):
    assert torch.equal(packed.generated(), packed.expected())
    tokens = torch.randint(61, (1, 24), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = packed.model(tokens).logits
    torch.testing.assert_close(logits(packed, tokens)[0], expected, rtol=1e-3, atol=1e-3)


def test_half_the_slots_change_no_bit(mixtral):
    tokens = torch.randint(61, (1, 24), generator=torch.Generator().manual_seed(1))
    expected, _ = logits(mixtral, tokens)
    for slots in (3, 4):
        for look_ahead in (False, True):
            for residency in (None, lambda layer, experts, rows: Lfu(experts, rows)):
                options = {"dram_bytes": budget_of(mixtral, slots), "look_ahead": look_ahead, "residency": residency}
                found, held = logits(mixtral, tokens, **options)
                assert sum(each.cache.slots for each in held) == slots * len(held)
                assert torch.equal(found, expected)


def test_quantised_experts_give_what_their_decoded_weights_give(tmp_path):
    """Experts of 4 and of 2 bits in one layer, for a prompt and for single tokens."""
    model, bits = mixtures("Mixtral", hidden_size=64, sliding_window=None), [[4, 2] * (COUNT // 2)] * 2
    decoded = copy.deepcopy(model)
    for experts, of_layer in zip(decoder_experts(decoded), bits, strict=True):
        for expert, of_expert in enumerate(of_layer):
            matrices = experts.matrices(expert)
            records = neuron_records.encode(*matrices, of_expert)
            for matrix, weights in zip(matrices, neuron_records.decode(records, 64, of_expert), strict=True):
                matrix.copy_(weights)
    pack_model(model, tmp_path / "store", WholeExperts(bits))
    tokens = torch.randint(61, (1, 24), generator=torch.Generator().manual_seed(1))
    found, _ = logits(Packed.of(tmp_path / "store"), tokens)
    with torch.no_grad():
        torch.testing.assert_close(found, decoded(tokens).logits, rtol=1e-3, atol=1e-3)


def test_wrong_predictions_cost_reads_and_change_no_bit(mixtral, monkeypatch):
    """Each layer is told to expect the experts that its router likes least; half the slots, and nothing kept."""
    tokens = torch.randint(61, (1, 24), generator=torch.Generator().manual_seed(1))
    expected, _ = logits(mixtral, tokens)
    monkeypatch.setattr(Router, "predict", _least_liked)
    for options in ({}, {"window": 0}):
        found, slots = logits(mixtral, tokens, dram_bytes=budget_of(mixtral, 3), **options)
        assert torch.equal(found, expected)
        assert all(each.cache.of_experts.wasted > 0 for each in slots[1:])
        assert slots[0].cache.of_experts.prefetched == 0


def test_counts_add_up_and_are_what_was_read(mixtral):
    """Each expert that was loaded was read once: late ones on demand, the others ahead."""
    with opened(mixtral.folder, dram_bytes=budget_of(mixtral, 3)) as ours:
        ours.generate(PROMPT, **GREEDY)
        counts = [ffn.slots.cache.of_experts for ffn in ours.strategy.ffns]
        reads = [span for span in ours.timeline.spans if span.stage == "read"]
    runs = ours.strategy.ffns and ours.store.layers_of("experts")[0].ops
    assert {span.nbytes for span in reads} == {run.nbytes for run in runs.values()}
    assert len(reads) == sum(count.late + count.prefetched for count in counts)
    assert counts[0].prefetched == 0 < min(count.prefetched for count in counts[1:])
    assert all(0 <= count.wasted <= count.prefetched and count.late <= count.needed for count in counts)


def test_without_reloading_a_token_goes_on_with_what_was_predicted(mixtral):
    """No expert is late but in the first layer and for the prompt; the text is another."""
    with opened(mixtral.folder, exact=False, dram_bytes=budget_of(mixtral, 3)) as ours:
        ours.model(PROMPT)
        before = [ffn.slots.cache.of_experts.late for ffn in ours.strategy.ffns]
        for _ in range(3):
            ours.model(PROMPT[:, :1])
        late = [ffn.slots.cache.of_experts.late - then for ffn, then in zip(ours.strategy.ffns, before, strict=True)]
        assert late[1:] == [0, 0, 0]
        assert late[0] > 0
        assert sum(ffn.slots.cache.of_experts.wasted for ffn in ours.strategy.ffns) == 0
        with torch.no_grad():
            found, expected = ours.model(PROMPT[:, :1]).logits, mixtral.model(PROMPT[:, :1]).logits
        assert found.isfinite().all()
        assert not torch.allclose(found, expected)


def test_a_prediction_counts_once(mixtral):
    """A mixture that is called by itself, after a token that it was predicted for, takes its own router's experts."""
    found: list[list[torch.Tensor]] = []
    for exact in (False, True):
        inputs = torch.randn(4, 1, 1, 64, generator=torch.Generator().manual_seed(3))
        with opened(mixtral.folder, exact=exact) as ours, torch.no_grad():
            found.append([])
            for x in inputs:
                ours.model(PROMPT[:, :1])
                found[-1].append(decoder_blocks(ours.model)[2].mlp(x))
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("needed", [True, False])
def test_a_read_error_in_a_prefetch_is_raised_where_the_expert_is_needed(mixtral, monkeypatch, needed):
    """Not before, and never if no token needs it; the next token reads what did not come."""
    prefetch, failed = ExpertSlots.prefetch, []
    predicted = torch.tensor([[3, 4, 5], [0, 1, 2], [0, 1, 2]])
    chosen = predicted if needed else torch.tensor([[3, 4, 5], [3, 4, 5], [0, 1, 2]])

    def fails(self, experts):
        fetch = self._fetch

        def fetched_badly(expert, slot):
            fetch(expert, slot).result()
            failed.append(expert)
            future = Future()
            future.set_exception(OSError(errno.EIO, f"bad sector under expert {expert}"))
            return future

        self._fetch = fetched_badly if self.layer == 2 else fetch
        prefetch(self, experts)
        del self._fetch

    options = {"dram_bytes": budget_of(mixtral, 3), "routing": lambda _, e: RecordedRouter(e, chosen, predicted)}
    with opened(mixtral.folder, **options) as ours, torch.no_grad():
        expected = [ours.model(PROMPT[:, :1]).logits for _ in range(3)]
    with opened(mixtral.folder, **options) as ours, torch.no_grad():
        ours.model(PROMPT[:, :1])
        with monkeypatch.context() as patch:
            patch.setattr(ExpertSlots, "prefetch", fails)
            with pytest.raises(OSError, match="bad sector under expert") if needed else nullcontext():
                assert torch.equal(ours.model(PROMPT[:, :1]).logits, expected[1])
        assert failed == [0, 1, 2]
        for ffn in ours.strategy.ffns:
            ffn.router._token = 2  # those behind the error have seen one token less
        assert torch.equal(ours.model(PROMPT[:, :1]).logits, expected[2])


def test_a_folder_of_another_model_is_refused(mixtral, tmp_path):
    """A configuration with other experts than those that are stored."""
    config = Packed("Mixtral", tmp_path / "store").folder / "model" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"num_local_experts": COUNT + 1}))
    with pytest.raises(UserError, match="experts"):
        opened(tmp_path / "store", verify=False)


def test_all_but_the_routed_experts_stay_in_memory(packed):
    rest = tensors_beside(packed.model, expert_weights(packed.model))
    routed = {id(it) for experts in mixtures_by_layer(packed.model).values() for it in experts.linears.parameters()}
    kept = {name for name, parameter in packed.model.named_parameters() if id(parameter) not in routed}
    assert kept <= set(rest)
    assert not any(id(tensor) in routed for tensor in rest.values())

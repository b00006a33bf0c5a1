"""A model whose neurons come from disk gives what the model in memory gives, within its budget, through any trouble."""

import contextlib

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, OPTConfig, OPTForCausalLM

from tests.offload.conftest import COMMON, FAMILIES, GEMMA3, in_parts, opened, pruned
from toolkit.errors import UserError
from toolkit.models.activation import activation_name
from toolkit.models.ffn import decoder_ffns
from toolkit.offload import by_neuron, neuron_ffn
from toolkit.offload.by_neuron import PREDICTORS
from toolkit.predictors import CopyLast, Gate, Oracle, save_predictors
from toolkit.predictors.predictor import Predictor
from toolkit.predictors.weightless import FromTrace
from toolkit.residency.policies import Lru
from toolkit.residency.replay import replay, units_of
from toolkit.sparsity.thresholds import Magnitudes, thresholded
from toolkit.storage.buffers import HUGE_PAGE_BYTES
from toolkit.storage.neuron_packing import Neurons
from toolkit.storage.packing import pack_model

PROMPT = torch.tensor([[5, 17, 3, 44, 8, 1]])
GREEDY = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
NUCLEUS = GREEDY | {"do_sample": True, "top_p": 0.9}
NEURONS, ZEROS = 1100, 0.8
WIDE = COMMON | {"initializer_range": 0.2}
MODELS = {
    "llama": (LlamaForCausalLM, LlamaConfig, WIDE | {"intermediate_size": NEURONS, "num_key_value_heads": 2}),
    "opt": (OPTForCausalLM, OPTConfig, FAMILIES["opt"][2] | {"ffn_dim": NEURONS}),
    "gemma3": (*GEMMA3[:2], GEMMA3[2] | {"intermediate_size": NEURONS}),
}
pytestmark = pytest.mark.usefixtures("one_thread")


class Exact(Oracle):
    """Predicts exactly the active neurons, as if that took no memory."""

    nbytes = 0


class Packed:
    """A model with thresholds, its folder and its exact predictors."""

    def __init__(self, family, folder):
        self.folder, self.model = folder, pruned(MODELS[family])
        sizes = Magnitudes.measure(self.model, torch.randint(61, (256,)), sequence_length=64)
        self.thresholds = sizes.thresholds(0.0 if family == "opt" else ZEROS)
        self.needs = [round(NEURONS * (1 - ZEROS))] * len(self.thresholds)
        pack_model(self.model, folder, Neurons(self.thresholds.tolist(), needs=self.needs), family)
        self.predictors = [
            Exact(limit, ffn, activation_name(self.model))
            for ffn, limit in zip(decoder_ffns(self.model), self.thresholds.tolist(), strict=True)
        ]

    def expected(self, **settings):
        torch.manual_seed(0)
        with thresholded(self.model, self.thresholds):
            return self.model.generate(PROMPT, **settings)

    def generated(self, settings=GREEDY, **options):
        torch.manual_seed(0)
        with opened(self.folder, **options) as ours:
            found = ours.generate(PROMPT, **settings)
            assert ours.budgets["dram"].used_bytes <= ours.budgets["dram"].limit_bytes
            return found


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return Packed("llama", tmp_path_factory.mktemp("neurons") / "llama")


@pytest.fixture(scope="module", params=MODELS)
def packed(request, tmp_path_factory):
    return Packed(request.param, tmp_path_factory.mktemp("neurons") / request.param)


def least_bytes(packed, **options):
    """The budget that an error asks for."""
    with pytest.raises(UserError, match="are needed") as told:
        opened(packed.folder, dram_bytes=1, **options)
    megabytes = float(str(told.value).partition("too small: ")[2].partition(" MB")[0])
    return int((megabytes + 0.1) * 1e6)


@pytest.mark.parametrize(
    ("kind", "window", "settings"),
    [("exact", 5, GREEDY), ("exact", 1, NUCLEUS), ("all", 1, GREEDY), ("all", 0, NUCLEUS)],
)
def test_tokens_are_those_of_the_thresholded_model_in_memory(packed, kind, window, settings):
    options = {"predictors": packed.predictors if kind == "exact" else None, "window": window}
    expected = packed.expected(**settings)
    assert torch.equal(packed.generated(settings, **options), expected)
    tight = least_bytes(packed, **options)
    assert torch.equal(packed.generated(settings, **options, dram_bytes=tight), expected)


def test_each_pass_gives_the_logits_of_the_model_in_memory(packed):
    """Also a few tokens at once, a long prompt, and a layer without a predictor."""
    tokens = torch.randint(61, (1, 40), generator=torch.Generator().manual_seed(1))
    some = [None, *packed.predictors[1:]]
    with thresholded(packed.model, packed.thresholds), torch.no_grad():
        expected = packed.model(tokens).logits
    with (
        opened(packed.folder, predictors=some, dram_bytes=least_bytes(packed, predictors=some)) as ours,
        torch.no_grad(),
    ):
        for count in (40, 3, 1, 17):
            found = ours.model(tokens[:, :count]).logits
            torch.testing.assert_close(found, expected[:, :count], rtol=1e-3, atol=1e-3)


class Missing(Predictor):
    """Misses a third of the active neurons: another one for another sign of the first input."""

    def __init__(self, exact):
        self.exact = exact

    @property
    def shape(self):
        return self.exact.shape

    def mask(self, x):
        return self.exact.mask(x) & ((torch.arange(NEURONS) + (x[:, :1] > 0)) % 3 > 0)


@contextlib.contextmanager
def masked(model, predictors):
    """Inside the block each FFN of a model in memory adds up the predicted neurons of each token: the plain oracle."""
    masks, hooks = {}, []
    for layer, (ffn, predictor) in enumerate(zip(decoder_ffns(model), predictors, strict=True)):

        def note(module, inputs, layer=layer, predictor=predictor):
            masks[layer] = predictor.mask(inputs[0].reshape(-1, inputs[0].shape[-1])).view(*inputs[0].shape[:-1], -1)

        def cut(module, inputs, layer=layer):
            return (inputs[0] * masks[layer],)

        hooks += [ffn.up.register_forward_pre_hook(note), ffn.down.register_forward_pre_hook(cut)]
    yield
    for hook in hooks:
        hook.remove()


def passes(model):
    """Logits of three texts at once and of one alone: a prompt, a few tokens, single tokens."""
    found = []
    for texts, parts in ((3, (12, 1, 2, 1)), (1, (5, 1, 1, 20))):
        tokens = torch.randint(61, (texts, sum(parts)), generator=torch.Generator().manual_seed(texts))
        found.append(in_parts(model, tokens, parts).flatten())
    return torch.cat(found)


def test_results_are_those_of_the_predicted_neurons_at_every_limit_and_again(packed, monkeypatch):
    """To the bit, whatever memory holds and held before; what a predictor misses stays missed."""
    monkeypatch.setattr(neuron_ffn, "AT_ONCE_BYTES", 70_000)
    predictors = [Missing(exact) for exact in packed.predictors]
    with thresholded(packed.model, packed.thresholds), masked(packed.model, predictors):
        expected = passes(packed.model)
    tight, found = least_bytes(packed, predictors=predictors), []
    lru = {"residency": lambda layer, neurons, rows: Lru(neurons, rows)}
    for options in ({}, {"dram_bytes": tight}, {"dram_bytes": tight + 400_000, **lru}, {"window": 0}):
        with opened(packed.folder, predictors=predictors, **options) as ours:
            found += [passes(ours.model), passes(ours.model)]
    torch.testing.assert_close(found[0], expected, rtol=1e-3, atol=1e-3)
    assert all(torch.equal(found[0], other) for other in found[1:])


def test_held_neurons_repair_what_a_predictor_misses_as_memory_allows(llama):
    predictors = [Missing(exact) for exact in llama.predictors]
    with thresholded(llama.model, llama.thresholds):
        exact = passes(llama.model)
    errors = []
    for neurons in ("predicted", "held"):
        with opened(llama.folder, predictors=predictors, neurons=neurons) as ours:
            errors += [float((passes(ours.model) - exact).norm()) for _ in range(2)]
    assert errors[0] == errors[1] > errors[2] > errors[3], "the second time more neurons are there"


def test_what_is_read_and_held(llama):
    """A token reads the neurons that it needs and the window lacks; the window is limited by tokens or by memory."""
    with opened(llama.folder, predictors=llama.predictors, window=50) as ours:
        ours.generate(PROMPT, **GREEDY)
        reads = sum(span.nbytes for span in ours.timeline.spans if span.stage == "read")
        loaded = sum(ffn.store.rows_loaded for ffn in ours.strategy.ffns)
        assert reads == 4096 * loaded  # a bundle takes a block
        assert {ffn.store.residency.rows for ffn in ours.strategy.ffns} == {NEURONS}
    tight = least_bytes(llama, predictors=llama.predictors)
    with opened(llama.folder, predictors=llama.predictors, dram_bytes=tight, window=50) as ours:
        rows = sum(ffn.store.residency.rows for ffn in ours.strategy.ffns)
        assert sum(llama.needs) <= rows < NEURONS * len(ours.strategy.ffns)
        ours.generate(PROMPT, **GREEDY)
        assert sum(ffn.store.rows_loaded for ffn in ours.strategy.ffns) > loaded
        matrices = sum(ffn.store.matrix.nbytes for ffn in ours.strategy.ffns)
        assert matrices <= ours.budgets["dram"].taken["neurons"] <= matrices + 2 * HUGE_PAGE_BYTES


def test_predictors_that_were_packed_with_the_model_are_used(llama, tmp_path, monkeypatch):
    """A budget without room for them is refused before they are read."""
    gates = [Gate.of(ffn, "silu", 0.1) for ffn in decoder_ffns(llama.model)]
    save = lambda place: save_predictors(place / PREDICTORS, "tiny", [*gates[:3], None])  # noqa: E731
    thresholds, settings = Neurons(llama.thresholds.tolist()), {"files": save}
    pack_model(llama.model, tmp_path / "store", thresholds, "tiny", **settings)
    with opened(tmp_path / "store") as ours:
        found = [ffn.predictor for ffn in ours.strategy.ffns]
        assert found[3] is None
        assert all(torch.equal(mine.weight, gate.weight) for mine, gate in zip(found[:3], gates[:3], strict=True))
        assert ours.budgets["dram"].taken["predictors"] == sum(gate.nbytes for gate in gates[:3])
    with monkeypatch.context() as patch:
        patch.setattr(by_neuron, "load_predictors", None)
        with pytest.raises(UserError, match=r"are needed \(.*predictors \d") as told:
            opened(tmp_path / "store", dram_bytes=1)
    with opened(tmp_path / "store", dram_bytes=told.value.needed_bytes) as ours:
        ours.generate(PROMPT, **GREEDY)
    pack_model(llama.model, tmp_path / "other", thresholds, "large", **settings)
    with pytest.raises(UserError, match="predictors of model 'tiny'; expected 'large'"):
        opened(tmp_path / "other")


class Recording(CopyLast):
    """Predicts every neuron, and writes down its calls and what fired."""

    def start(self, prefill):
        self.calls, self.fired = ["start"], list(prefill)

    def predict(self, context):
        self.calls.append("predict")
        return np.arange(NEURONS)

    def observe(self, active):
        self.calls.append("observe")
        self.fired.append(active)


def test_a_predictor_with_a_state_starts_with_the_prompt_and_observes_each_token(llama):
    predictors = [Recording(NEURONS, 48) for _ in llama.thresholds]
    with opened(llama.folder, predictors=predictors) as ours:
        assert torch.equal(ours.generate(PROMPT, **GREEDY), llama.expected(**GREEDY))
        with pytest.raises(UserError, match="predictors with a state"):
            ours.generate(PROMPT, draft=ours, **GREEDY)
    assert predictors[0].calls == ["start", *["predict", "observe"] * 11]
    assert len(predictors[0].fired) == PROMPT.shape[1] + 11
    assert all(0 < len(active) < NEURONS and (np.diff(active) > 0).all() for active in predictors[0].fired)


def test_a_policy_of_the_users_reads_what_its_replay_reads(llama):
    """Recorded predictions make it the same tokens for both."""
    recorded = [np.random.default_rng(layer).random((9, NEURONS)) < 0.2 for layer in range(len(llama.needs))]
    predictors = [FromTrace(active, WIDE["hidden_size"]) for active in recorded]
    chosen = {"residency": lambda layer, neurons, rows: Lru(neurons, rows)}
    with opened(llama.folder, predictors=predictors, **chosen) as ours, torch.no_grad():
        for token in range(9):
            ours.model(torch.tensor([[token]]))
        stores = [ffn.store for ffn in ours.strategy.ffns]
        for store, active in zip(stores, recorded, strict=True):
            assert isinstance(store.residency, Lru)
            assert store.rows_loaded == replay(units_of(active), Lru(NEURONS, store.residency.rows))["loaded"].sum()
